"""The models keep what nxdt asks of every model."""

from __future__ import annotations

import pytest
from nxdt_plugin_llama.builder import LlamaBuilder, MistralBuilder
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig, RopeScalingConfig

from nxdt_core.testing.model_contract import ModelContract

SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 96,
}


class TestLlama(ModelContract):
    """With a head of its own."""

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        return LlamaBuilder(LlamaConfig(**SMALL))


class TestTiedLlama(ModelContract):
    """With the head tied to the embedding, and stretched positions."""

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        scaling = RopeScalingConfig(rope_type="linear", factor=2.0)
        return LlamaBuilder(LlamaConfig(**SMALL, share_embeddings_and_output_weights=True, rope_scaling=scaling))


class TestMistral(ModelContract):
    """With a window."""

    @pytest.fixture
    def builder(self) -> MistralBuilder:
        return MistralBuilder(MistralConfig(**SMALL, sliding_window=5))
