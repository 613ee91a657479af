"""Distillation keeps what nxdt asks of all objectives, with a teacher whose logits follow from the student's."""

from __future__ import annotations

import pytest
from nxdt_plugin_distill.config import DistillConfig
from nxdt_plugin_distill.objective import Distill
from nxdt_testing.objective_contract import ObjectiveContract


class Taught(Distill):
    """Its teacher is nearly as certain as the student, and of something else: in every layout the same."""

    def _taught(self, logits):
        return self._kept((2 * logits.detach()).sin())


class TestForward(ObjectiveContract):
    """The forward KL."""

    @pytest.fixture
    def factory(self):
        return Taught

    @pytest.fixture
    def section(self):
        return DistillConfig(teacher="somewhere")

    def tries(self, layout, config):
        """By default in none: test_distill_layouts trains with a teacher in all."""
        return config.getoption("samples", default=None) == "all"


class TestJsd(TestForward):
    """The mixture alone."""

    @pytest.fixture
    def section(self):
        return DistillConfig(teacher="somewhere", beta=0.3, temperature=2.0, kd_ratio=1.0)


class TestReverse(TestForward):
    """The reverse KL."""

    @pytest.fixture
    def section(self):
        return DistillConfig(teacher="somewhere", beta=1.0, kd_ratio=0.9)


class TestTop(TestForward):
    """Some tokens."""

    @pytest.fixture
    def section(self):
        return DistillConfig(teacher="somewhere", top_k=3, temperature=0.5)
