"""The model keeps what nxdt asks of every model."""

import pytest
from acme_nxdt.config import BigramConfig
from acme_nxdt.model import BigramBuilder
from nxdt_testing.model_contract import ModelContract


class TestBigram(ModelContract):
    """All tests are inherited."""

    @pytest.fixture
    def builder(self) -> BigramBuilder:
        """A small model."""
        return BigramBuilder(BigramConfig(vocab_size=16, hidden_size=32))
