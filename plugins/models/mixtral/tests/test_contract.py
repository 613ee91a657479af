"""The models keep what nxdt asks of every model."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from nxdt_plugin_mixtral.builder import MixtralBuilder
from nxdt_plugin_mixtral.config import MixtralConfig, MoEConfig
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.layouts import LAYOUTS

from tests.sampling import sampled, takes_all

CAPABILITIES = frozenset({"tp", "sp", "pp", "cp", "ep", "lora"})

SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 96,
}


class OfOneLayout(ModelContract):
    """In one of the layouts that the model declares: what the layers do in each is compared elsewhere, too."""

    def tries(self, layout: str, config: pytest.Config) -> bool:
        declared = [name for name, each in LAYOUTS.items() if each.needs <= CAPABILITIES and not each.exhaustive]
        return takes_all(config) or layout in sampled(config, declared, 1, of=type(self).__name__)


class TestMixtral(OfOneLayout):
    """Dropless, an expert mixture in every layer; the other kinds say in what they differ."""

    changes: ClassVar[dict[str, Any]] = {}
    moe: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def builder(self) -> MixtralBuilder:
        return MixtralBuilder(MixtralConfig(**SMALL, **self.changes, moe=MoEConfig(num_experts=4, **self.moe)))


class TestTiedMixtralWithAWindow(TestMixtral):
    """One matrix for embedding and head."""

    changes: ClassVar = {"share_embeddings_and_output_weights": True, "sliding_window": 5}


class TestHalfDense(TestMixtral):
    """Every second layer has one feed-forward block."""

    moe: ClassVar = {"frequency": 2}
    exchanges_with_hf = False
