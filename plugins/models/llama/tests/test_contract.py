"""The models keep what nxdt asks of every model."""

from __future__ import annotations

from typing import ClassVar

import pytest
from nxdt_plugin_llama.builder import LlamaBuilder, MistralBuilder, Qwen2Builder, Qwen3Builder
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, RopeScalingConfig
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.layouts import LAYOUTS

from tests.sampling import sampled, takes_all

SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 96,
}
CAPABILITIES = frozenset({"tp", "sp", "pp", "cp", "lora"})


class OfOneLayout(ModelContract):
    """In one of the layouts that the model declares: what the layers do in each is compared elsewhere, too."""

    always: ClassVar[tuple[str, ...]] = ()

    def tries(self, layout: str, config: pytest.Config) -> bool:
        declared = [
            name
            for name, each in LAYOUTS.items()
            if each.needs <= (self.capabilities or CAPABILITIES) and not each.exhaustive
        ]
        return (
            takes_all(config) or layout in self.always or layout in sampled(config, declared, 1, of=type(self).__name__)
        )


class TestLlama(OfOneLayout):
    """With a head of its own."""

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        return LlamaBuilder(LlamaConfig(**SMALL))


class TestTiedLlama(OfOneLayout):
    """With the head tied to the embedding, and stretched positions."""

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        scaling = RopeScalingConfig(rope_type="linear", factor=2.0)
        return LlamaBuilder(LlamaConfig(**SMALL, share_embeddings_and_output_weights=True, rope_scaling=scaling))


class TestCapped(OfOneLayout):
    """With a scale of attention, and caps of its scores and of the logits."""

    always = ("tp-sp", "cp")
    exchanges_with_hf = False

    @pytest.fixture
    def builder(self) -> MistralBuilder:
        caps = {"attention_scale": 0.6, "attention_softcap": 0.4, "logits_softcap": 0.3, "init_method_std": 0.2}
        return MistralBuilder(MistralConfig(**SMALL, sliding_window=5, **caps))


class TestMistral(OfOneLayout):
    """With a window."""

    @pytest.fixture
    def builder(self) -> MistralBuilder:
        return MistralBuilder(MistralConfig(**SMALL, sliding_window=5))


class TestQwen2(OfOneLayout):
    """With biases of queries, keys and values, and slow frequencies divided."""

    always = ("tp-pp",)

    @pytest.fixture
    def builder(self) -> Qwen2Builder:
        scaling = RopeScalingConfig(rope_type="yarn", factor=2.0, original_max_position_embeddings=16)
        return Qwen2Builder(Qwen2Config(**SMALL, rope_scaling=scaling))


class TestQwen3(OfOneLayout):
    """With norms of queries and keys, all biases of attention, and frequencies that follow from the length."""

    always = ("tp-pp",)
    capabilities = CAPABILITIES - {"cp"}

    @pytest.fixture
    def builder(self) -> Qwen3Builder:
        scaling = RopeScalingConfig(
            rope_type="longrope", short_factor=(1.0,) * 6, long_factor=(4.0,) * 6, original_max_position_embeddings=8
        )
        return Qwen3Builder(Qwen3Config(**SMALL, attention_bias=True, rope_scaling=scaling))


class TestBiasedLlama(OfOneLayout):
    """With all biases, and a base that grows with the length."""

    always = ("tp-pp",)
    capabilities = CAPABILITIES - {"cp"}

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        scaling = RopeScalingConfig(rope_type="dynamic", factor=8.0, original_max_position_embeddings=8)
        return LlamaBuilder(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rope_scaling=scaling))


class TestNoisyLlama(OfOneLayout):
    """With noise on embeddings, which every layout draws alike."""

    noisy = True

    @pytest.fixture
    def builder(self) -> LlamaBuilder:
        return LlamaBuilder(LlamaConfig(**SMALL, neftune_noise_alpha=20.0))
