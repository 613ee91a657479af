"""The component ``mixtral``: how it is built, sharded, initialised and exchanged.

It is a rotary decoder with mixtures of experts, in plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.decoder_builder import LAYER, MLP, NORMS, SWIGLU_STYLES, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.moe.sinkhorn import SinkhornRouter
from nxdt_core.protocols.plan import ExpertPlan, ParallelPlan, TensorStyle
from nxdt_plugin_mixtral.config import MixtralConfig

_MOE = f"{LAYER}.moe"
_EXPERTS = f"{_MOE}.experts"


class Mixtral(RotaryDecoder):
    """Jiang et al. 2024 (arXiv:2401.04088). The feed-forward block of a layer is ``moe``, or ``mlp`` in a layer without
    experts (``moe.frequency`` above 1)."""

    def __init__(self, config: MixtralConfig) -> None:
        masks = DocumentMasks()
        super().__init__(config, (_layer(config, masks, number) for number in range(config.num_layers)))


def _layer(config: MixtralConfig, masks: DocumentMasks, number: int) -> RotaryDecoderLayer:
    if number not in config.expert_layers:
        return RotaryDecoderLayer(config, masks, SwiGLU(config.hidden_size, config.ffn_hidden_size))
    moe, size, layers = config.moe, config.hidden_size, len(config.expert_layers)
    common: dict[str, Any] = {
        "capacity_factor": moe.capacity,
        # Ours is 1 where experts are balanced and is summed over layers; transformers' is top_k, and a mean.
        "balance_coefficient": moe.balance_coefficient * moe.top_k / layers,
        "pooled": (number, layers) if moe.pooled else None,
    }
    if moe.routing_algorithm == "sinkhorn":
        router: TopKRouter = SinkhornRouter(
            size,
            moe.num_experts,
            activation=moe.router_activation,
            iterations=moe.sinkhorn_iterations,
            tolerance=moe.sinkhorn_tol,
            **common,
        )
    else:
        normalize = moe.normalize_top_k_affinities
        router = TopKRouter(size, moe.num_experts, top_k=moe.top_k, normalize=normalize, **common)
    experts = SwiGLUExperts(size, config.ffn_hidden_size, moe.num_experts, dropout=moe.dropout)
    mixture = MixtureOfExperts(router=router, experts=experts, chunks=moe.exchange_chunks)
    return RotaryDecoderLayer(config, masks, mixture, name="moe")


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
