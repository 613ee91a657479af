"""The optimizer keeps what nxdt asks of every optimizer."""

import pytest
from acme_nxdt.config import LionConfig
from acme_nxdt.optimizer import Lion
from nxdt_testing.optimizer_contract import OptimizerContract

from nxdt_core.protocols.optimizer import OptimizerFactory


class TestLion(OptimizerContract):
    """All tests are inherited."""

    sharded = True  # as the record declares

    @pytest.fixture
    def factory(self) -> OptimizerFactory:
        """The target of the record."""
        return Lion

    @pytest.fixture
    def section(self) -> LionConfig:
        """Its keys."""
        return LionConfig(lr=0.01, weight_decay=0.1)
