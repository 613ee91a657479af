"""Next-token prediction keeps what nxdt asks of all objectives."""

from __future__ import annotations

import pytest

from nxdt_core.builtins.objective_causal_lm import CausalLM
from nxdt_core.testing.objective_contract import ObjectiveContract


class TestCausalLM(ObjectiveContract):
    """All tests are inherited."""

    @pytest.fixture
    def factory(self):
        return CausalLM
