"""The schedule keeps what nxdt asks of every schedule."""

import pytest
from acme_nxdt.config import InverseSqrtConfig
from acme_nxdt.schedule import inverse_sqrt
from nxdt_testing.schedule_contract import ScheduleContract

from nxdt_core.protocols.schedule import ScheduleFactory


class TestInverseSqrt(ScheduleContract):
    """All tests are inherited."""

    @pytest.fixture
    def factory(self) -> ScheduleFactory:
        """The target of the record."""
        return inverse_sqrt

    @pytest.fixture
    def section(self) -> InverseSqrtConfig:
        """Its keys."""
        return InverseSqrtConfig(warmup_steps=10)
