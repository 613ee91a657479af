"""The decoder keeps what nxdt asks of every model."""

import pytest
from acme_nxdt.decoder import DecoderBuilder
from acme_nxdt.decoder_config import DecoderConfig
from nxdt_testing.model_contract import ModelContract


class TestDecoder(ModelContract):
    """All tests are inherited."""

    @pytest.fixture
    def builder(self) -> DecoderBuilder:
        """A small model."""
        sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
        return DecoderBuilder(DecoderConfig(**sizes, num_kv_heads=2, vocab_size=64))
