"""Section ``model`` of the small mixture of experts that contracts train; no torch, as in any plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section
from nxdt_core.models.decoder_config import RotaryDecoderConfig

__all__ = ["MoEConfig", "MoEModelConfig"]


class MoEConfig(Section):
    """The mixture of experts of each layer; most names are NxD Training's."""

    num_experts: PositiveInt = 4
    """Experts of a layer."""
    top_k: PositiveInt = 2
    """Experts a token."""
    router_order: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    """Softmax over all experts before the choice, or over the chosen ones after it."""
    normalize_top_k_affinities: bool = True
    """Let a token's weights add up to 1."""
    capacity_factor: float | None = None
    """Drop what exceeds this multiple of an expert's equal share; ``null`` drops nothing."""
    router_aux_loss_coef: NonNegativeFloat = 0.02
    """Coefficient of the load-balancing loss."""
    router_z_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of the z-loss."""
    shared_ffn_hidden_size: int = 0
    """Width of the block that all tokens pass in addition to their experts; 0: none."""


class MoEModelConfig(RotaryDecoderConfig):
    """Section ``model`` of a small decoder with mixtures of experts; ``ffn_hidden_size`` is the width of an expert."""

    num_layers: PositiveInt = 2
    hidden_size: PositiveInt = 32
    ffn_hidden_size: PositiveInt = 32
    num_attention_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = 2
    vocab_size: PositiveInt = 64
    init_method_std: NonNegativeFloat = 0.1  # wide, so that routers tell tokens apart from the start
    moe: MoEConfig = Field(default_factory=MoEConfig)
    """The mixture of experts."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work together."""
        yield from RotaryDecoderConfig.check(self)
        if self.moe.top_k > self.moe.num_experts:
            yield "moe.top_k", f"exceeds moe.num_experts ({self.moe.num_experts})"
        if self.moe.capacity_factor is not None and self.moe.capacity_factor <= 0:
            yield "moe.capacity_factor", "must be above 0, or null"
