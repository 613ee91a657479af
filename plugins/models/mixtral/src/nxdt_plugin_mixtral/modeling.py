"""The module: a rotary decoder with mixtures of experts. Plain torch, nothing parallel."""

from __future__ import annotations

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.moe.sinkhorn import SinkhornRouter
from nxdt_plugin_mixtral.config import MixtralConfig


class Mixtral(RotaryDecoder):
    """Jiang et al. 2024 (arXiv:2401.04088). The feed-forward block of a layer is ``moe``, or ``mlp`` in a layer without
    experts (``moe.frequency`` above 1)."""

    def __init__(self, config: MixtralConfig) -> None:
        masks = DocumentMasks()
        super().__init__(config, (_layer(config, masks, number) for number in range(config.num_layers)))


def _layer(config: MixtralConfig, masks: DocumentMasks, number: int) -> RotaryDecoderLayer:
    if number in config.expert_layers:
        return RotaryDecoderLayer(config, masks, _mixture(config, number), name="moe")
    return RotaryDecoderLayer(config, masks, SwiGLU(config.hidden_size, config.ffn_hidden_size))


def _mixture(config: MixtralConfig, number: int) -> MixtureOfExperts:
    moe = config.moe
    experts = SwiGLUExperts(config.hidden_size, config.ffn_hidden_size, moe.num_experts, dropout=moe.dropout)
    return MixtureOfExperts(router=_router(config, number), experts=experts, chunks=moe.exchange_chunks)


def _router(config: MixtralConfig, number: int) -> TopKRouter:
    moe = config.moe
    # Ours is 1 where experts are balanced and is summed over layers; transformers' is top_k, and a mean.
    pooled = (number, len(config.expert_layers)) if moe.pooled else None
    balance = moe.balance_coefficient * moe.top_k / len(config.expert_layers)
    if moe.routing_algorithm == "sinkhorn":
        return SinkhornRouter(
            config.hidden_size,
            moe.num_experts,
            activation=moe.router_activation,
            iterations=moe.sinkhorn_iterations,
            tolerance=moe.sinkhorn_tol,
            capacity_factor=moe.capacity,
            balance_coefficient=balance,
            pooled=pooled,
        )
    return TopKRouter(
        config.hidden_size,
        moe.num_experts,
        top_k=moe.top_k,
        normalize=moe.normalize_top_k_affinities,
        capacity_factor=moe.capacity,
        balance_coefficient=balance,
        pooled=pooled,
    )
