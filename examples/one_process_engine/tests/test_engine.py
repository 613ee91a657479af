"""The engine keeps what nxdt asks of every engine."""

from nxdt_testing.engine_contract import EngineContract


class TestSolo(EngineContract):
    """All tests are inherited."""

    engine = "solo"
