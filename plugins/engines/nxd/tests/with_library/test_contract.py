"""The engine keeps what nxdt asks of every engine: each declared layout trains on gloo as one process does."""

from nxdt_testing.engine_contract import EngineContract


class TestNxd(EngineContract):
    """All tests are inherited."""

    engine = "nxd"
    float64 = False
