"""The component ``mixtral``: builds the module and says how it may be sharded, initialised and exchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from nxdt_core.models.decoder_builder import LAYER, MLP, NORMS, SWIGLU_STYLES, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.protocols.plan import ExpertPlan, ParallelPlan, TensorStyle
from nxdt_plugin_mixtral.config import MixtralConfig
from nxdt_plugin_mixtral.modeling import Mixtral

_MOE = f"{LAYER}.moe"
_EXPERTS = f"{_MOE}.experts"


class MixtralBuilder(RotaryDecoderBuilder[MixtralConfig]):
    """A decoder whose feed-forward blocks are mixtures of experts."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM", "MixtralForSequenceClassification")

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """Return the patterns of the parameters that write to the residual stream."""
        attention, dense = super().residual_writers
        return (attention, *((dense,) if self.config.dense_layers else ()), f"{_EXPERTS}.down_proj")

    def build(self) -> Mixtral:
        """Return the whole model."""
        return Mixtral(self.config)

    def plan(self) -> ParallelPlan:
        """Return the plan of a decoder with expert parallelism by experts and tensor parallelism by the columns of
        each; the names to recompute are NxD Training's."""
        # Patterns of a plan that match nothing are an error, so dense blocks are named only where there are any.
        dense: dict[str, dict[str, TensorStyle]] = {MLP: dict(SWIGLU_STYLES)} if self.config.dense_layers else {}
        blocks = {_MOE: {}, **dense}
        activations = (f"{_EXPERTS}.activation", *(f"{block}.activation" for block in dense))
        plan = rotary_decoder_plan(
            self.config,
            feed_forward=blocks,
            recompute={
                "LlamaMLP": tuple(blocks),
                "ActivationMultiplyMLP": activations,
                "MixtralRMSNorm": NORMS,
                "MixtralDecoderLayer": (LAYER,),
            },
        )
        return replace(
            plan,
            cheap=(*NORMS, *activations),
            experts=ExpertPlan(
                modules=(_EXPERTS,),
                tensor={
                    f"{_EXPERTS}.gate_proj": "column",
                    f"{_EXPERTS}.up_proj": "column",
                    f"{_EXPERTS}.down_proj": "row",
                },
                dispatchers=(f"{_MOE}.dispatcher",),
                routers=(f"{_MOE}.router",),
                pooled=self.config.moe.num_experts if self.config.moe.pooled else 0,
            ),
        )

    def feed_forward_weights(self) -> int:
        """Return how many weights a token is multiplied with: of experts, those that it is sent to."""
        c = self.config
        block = 3 * c.hidden_size * c.ffn_hidden_size
        sparse = c.moe.top_k * block + c.hidden_size * c.moe.num_experts
        return len(c.expert_layers) * sparse + c.dense_layers * block
