"""The models keep what nxdt asks of every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from nxdt_plugin_gpt.builder import GPTBuilder
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.layouts import LAYOUTS

from tests.sampling import sampled, takes_all

CAPABILITIES = frozenset({"tp", "sp", "pp", "cp", "lora"})


class OfOneLayout(ModelContract):
    """In one of the layouts that the model declares: what the layers do in each is compared elsewhere, too."""

    def tries(self, layout: str, config: pytest.Config) -> bool:
        declared = [name for name, each in LAYOUTS.items() if each.needs <= CAPABILITIES and not each.exhaustive]
        return takes_all(config) or layout in sampled(config, declared, 1, of=type(self).__name__)


class TestGPT2(OfOneLayout):
    """The other kinds say in what they differ."""

    changes: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def builder(self, builder: Callable[..., GPTBuilder]) -> GPTBuilder:
        return builder(**self.changes)


class TestGPTNeoX(TestGPT2):
    """Blocks side by side, part of each head rotated."""

    changes: ClassVar = {
        "position_embedding_type": "rope",
        "rotary_percentage": 0.5,
        "transformer_block_type": "gpt_j",
        "share_embeddings_and_output_weights": False,
    }


class TestGrouped(TestGPT2):
    """Heads that share keys, gates, no biases."""

    changes: ClassVar = {"num_kv_heads": 2, "activation": "swiglu", "normalization": "rmsnorm", "has_bias": False}
    exchanges_with_hf = False


class TestPostLN(TestGPT2):
    """Norms behind the blocks."""

    changes: ClassVar = {"transformer_block_type": "post_ln", "normalization": "layernorm1p", "activation": "geglu"}
    exchanges_with_hf = False


class TestNormformer(TestGPT2):
    """More norms, one of them over all channels of the feed-forward block."""

    changes: ClassVar = {"transformer_block_type": "normformer", "share_embeddings_and_output_weights": False}
    exchanges_with_hf = False
    replicated = ("layers.*.mlp.*.weight",)
