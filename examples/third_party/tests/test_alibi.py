"""The decoder with ALiBi keeps what nxdt asks of every model: on two ranks it trains as in one process."""

import pytest
from acme_nxdt.alibi import AlibiBuilder
from acme_nxdt.alibi_config import AlibiConfig
from nxdt_testing.model_contract import ModelContract


class TestAlibi(ModelContract):
    """All tests are inherited."""

    @pytest.fixture
    def builder(self) -> AlibiBuilder:
        """A small model."""
        return AlibiBuilder(AlibiConfig(num_layers=2, hidden_size=32, vocab_size=64))
