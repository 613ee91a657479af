"""The schedule keeps what nxdt asks of every schedule."""

import pytest
from acme_nxdt.config import InverseSqrtConfig
from acme_nxdt.schedule import inverse_sqrt
from nxdt_testing.lr_scheduler_contract import LRSchedulerContract

from nxdt_core.protocols.lr_scheduler import LRScheduleFactory


class TestInverseSqrt(LRSchedulerContract):
    """All tests are inherited."""

    @pytest.fixture
    def factory(self) -> LRScheduleFactory:
        """The target of the record."""
        return inverse_sqrt

    @pytest.fixture
    def section(self) -> InverseSqrtConfig:
        """Its keys."""
        return InverseSqrtConfig(warmup_steps=10)
