"""The models keep what nxdt asks of every model."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from nxdt_plugin_mixtral.builder import MixtralBuilder
from nxdt_plugin_mixtral.config import MixtralConfig, MoEConfig
from nxdt_testing.model_contract import ModelContract
from nxdt_testing.runs.layouts import LAYOUTS, PP, Layout, compare

from nxdt_core.models.rope_scaling import RopeScalingConfig
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


YARN = RopeScalingConfig(rope_type="yarn", factor=2.0, original_max_position_embeddings=16)


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
        return MixtralBuilder(MixtralConfig(**{**SMALL, **self.changes}, moe=MoEConfig(num_experts=4, **self.moe)))


class TestTiedMixtralWithAWindow(TestMixtral):
    """One matrix for embedding and head."""

    changes: ClassVar = {"share_embeddings_and_output_weights": True, "sliding_window": 5}


class TestHalfDense(TestMixtral):
    """Every second layer has one feed-forward block."""

    moe: ClassVar = {"frequency": 2}
    exchanges_with_hf = False


class TestPooledMixtral(TestMixtral):
    """With a load-balancing loss over the tokens of all layers, which pipeline stages have some of each."""

    changes: ClassVar = {"num_layers": 4, "qk_norm": True, "rope_scaling": YARN}
    moe: ClassVar = {"pool_router_aux_loss": True, "router_aux_loss_coef": 2.0}
    exchanges_with_hf = False

    def tries(self, layout: str, config: pytest.Config) -> bool:
        return super().tries(layout, config) or layout == "tp-pp"

    def test_interleaved_stages_pool_the_layers_of_both(self, builder: MixtralBuilder) -> None:
        virtual = "distributed_strategy.virtual_pipeline_model_parallel_size=2"
        assert not compare(builder, Layout(needs=frozenset({"pp"}), settings=(PP, virtual)))
