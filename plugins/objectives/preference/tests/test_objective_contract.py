"""The losses of pairs keep what nxdt asks of all objectives."""

from __future__ import annotations

import pytest
from nxdt_plugin_preference.config import DpoConfig, OrpoConfig
from nxdt_plugin_preference.objectives import Dpo, Orpo
from nxdt_testing.objective_contract import ObjectiveContract


class TestDpo(ObjectiveContract):
    """Against a reference."""

    @pytest.fixture
    def factory(self):
        return Dpo

    @pytest.fixture
    def section(self):
        return DpoConfig(kl_beta=0.1)

    def tries(self, layout, config):
        return layout == "cp" or config.getoption("samples", default=None) == "all"


class TestOrpo(ObjectiveContract):
    """Two terms."""

    @pytest.fixture
    def factory(self):
        return Orpo

    @pytest.fixture
    def section(self):
        return OrpoConfig()

    def tries(self, layout, config):
        """By default in none: tests/engine/layouts trains by it in several."""
        return config.getoption("samples", default=None) == "all"


@pytest.mark.slow  # the other shows the same
class TestOrpoOfAnswers(TestOrpo):
    """As in the paper."""

    @pytest.fixture
    def section(self):
        return OrpoConfig(prompt_in_nll=False)
