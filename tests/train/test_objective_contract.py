"""Next-token prediction keeps what nxdt asks of all objectives."""

from __future__ import annotations

import pytest
from nxdt_testing.objective_contract import ObjectiveContract

from nxdt_core.config.schema import CausalLMConfig
from nxdt_core.models.loss import CausalLM
from tests.sampling import takes_all


class TestCausalLM(ObjectiveContract):
    """All tests are inherited. By default it trains in one layout: the tests of all others train with this loss."""

    def tries(self, layout, config):
        return layout == "tp" or takes_all(config)

    @pytest.fixture
    def factory(self):
        return CausalLM


class TestSmoothed(TestCausalLM):
    """With smoothed labels."""

    def tries(self, layout, config):
        return layout in ("tp", "pp") or takes_all(config)

    @pytest.fixture
    def section(self):
        return CausalLMConfig(label_smoothing=0.2)
