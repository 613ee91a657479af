"""The losses of pairs keep what nxdt asks of all objectives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nxdt_plugin_preference.config import CpoConfig, DpoConfig, KtoConfig, OrpoConfig, RewardConfig
from nxdt_plugin_preference.objectives import Cpo, Dpo, Kto, Orpo, Reward
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


class TestIpo(TestDpo):
    """Means over an answer's tokens."""

    @pytest.fixture
    def section(self):
        return DpoConfig(kl_beta=0.1, loss_type="ipo")


class TestSimpo(TestDpo):
    """The same, without a reference."""

    @pytest.fixture
    def factory(self):
        return Cpo

    @pytest.fixture
    def section(self):
        return CpoConfig(beta=2.0, loss_type="simpo", cpo_alpha=0.5, label_smoothing=0.1)

    def tries(self, layout, config):
        return layout == "tp" or config.getoption("samples", default=None) == "all"


class TestKto(TestDpo):
    """With the KL of its global batch."""

    @pytest.fixture
    def factory(self):
        return partial(Kto, kl=torch.tensor(0.5))

    @pytest.fixture
    def section(self):
        return KtoConfig(desirable_weight=0.7)


class TestReward(ObjectiveContract):
    """Scores; tests/engine/layouts trains by them."""

    @pytest.fixture
    def factory(self):
        return Reward

    @pytest.fixture
    def section(self):
        return RewardConfig(center_rewards_coefficient=0.1)


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
