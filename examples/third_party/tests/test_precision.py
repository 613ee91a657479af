"""The precision policy keeps what nxdt asks of every one."""

import pytest
from acme_nxdt.precision import fp64
from nxdt_testing.precision_contract import PrecisionContract

from nxdt_core.protocols.precision import PrecisionFactory


class TestFP64(PrecisionContract):
    """All tests are inherited."""

    @pytest.fixture
    def factory(self) -> PrecisionFactory:
        """The target of the record."""
        return fp64
