"""The small model of contracts, a decoder with mixtures of experts and every kind of plan, and an adapter of it.

Register it as ``ModelComponent(name="moe-test", target="nxdt_testing.runs.moe:MoEBuilder",
config="nxdt_testing.runs.moe_config:MoEModelConfig", …)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.decoder_builder import LAYER, NORMS, SWIGLU_STYLES, decoder_flops_per_token, rotary_decoder_plan
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.norm import RMSNorm
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import ExpertPlan, InitRule, ParallelPlan
from nxdt_testing.runs.moe_config import MoEModelConfig

__all__ = ["ADDED", "MoEBuilder", "ScaleAdapter"]

_MOE = f"{LAYER}.moe"
_EXPERTS = f"{_MOE}.experts"
ADDED = "norm.scale"
"""Name of the parameter that the adapter adds."""


class MoEBuilder(ModelBuilder):
    """A :class:`~nxdt_core.protocols.model.ModelBuilder`."""

    def __init__(self, config: MoEModelConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="moe-test", problems=problems)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_sequence_length: int | None = None

    def build(self) -> RotaryDecoder:
        """Return the whole model."""
        masks, layers = DocumentMasks(), range(self.config.num_layers)
        blocks = (RotaryDecoderLayer(self.config, masks, _mixture(self.config), name="moe") for _ in layers)
        return RotaryDecoder(self.config, blocks)

    def plan(self) -> ParallelPlan:
        """Return a plan that allows every kind of parallelism."""
        # Patterns of a plan that match nothing are an error, so those of the shared block come with it alone.
        shared = SWIGLU_STYLES if self.config.moe.shared_ffn_hidden_size else {}
        block = {f"shared.{name}": style for name, style in shared.items()}
        plan = rotary_decoder_plan(self.config, feed_forward={_MOE: block}, recompute={"MixtureOfExperts": (_MOE,)})
        experts = ExpertPlan(
            modules=(_EXPERTS,),
            tensor={
                f"{_EXPERTS}.gate_proj": "column",
                f"{_EXPERTS}.up_proj": "column",
                f"{_EXPERTS}.down_proj": "row",
            },
            dispatchers=(f"{_MOE}.dispatcher",),
            routers=(f"{_MOE}.router",),
        )
        return replace(plan, experts=experts)

    def init_rules(self) -> Sequence[InitRule]:
        """Ones for norms, normal for matrices."""
        return (
            *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=1.0) for norm in NORMS),
            InitRule(pattern="*", distribution="normal", std=self.config.init_method_std),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.decoder_builder.decoder_flops_per_token`."""
        c = self.config
        widths = c.moe.top_k * c.ffn_hidden_size + c.moe.shared_ffn_hidden_size
        weights = c.num_layers * c.hidden_size * (3 * widths + c.moe.num_experts)
        return decoder_flops_per_token(
            sequence_length,
            layers=c.num_layers,
            hidden_size=c.hidden_size,
            query_width=c.num_attention_heads * c.head_size,
            kv_width=c.kv_heads * c.head_size,
            feed_forward=weights,
            vocab_rows=c.vocab_size,
            window=c.window,
        )


def _mixture(config: MoEModelConfig) -> MixtureOfExperts:
    moe = config.moe
    router = TopKRouter(
        config.hidden_size,
        moe.num_experts,
        top_k=moe.top_k,
        order=moe.router_order,
        normalize=moe.normalize_top_k_affinities,
        capacity_factor=moe.capacity_factor,
        balance_coefficient=moe.router_aux_loss_coef,
        z_coefficient=moe.router_z_loss_coef,
    )
    experts = SwiGLUExperts(config.hidden_size, config.ffn_hidden_size, moe.num_experts)
    shared = SwiGLU(config.hidden_size, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None
    return MixtureOfExperts(router=router, experts=experts, shared=shared)


class _Scaled(RMSNorm):
    """A norm that is followed by its own scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        return super().forward(hidden) * self.scale


class ScaleAdapter(Adapter):
    """A :class:`nxdt_core.protocols.adapter.Adapter` that freezes a model and trains one scale of its output."""

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze ``module`` and add the scale."""
        norm: Any = module.norm
        with torch.device(norm.weight.device):
            scaled = _Scaled(norm.weight.numel(), norm.eps).to(norm.weight.dtype)
        module.norm = scaled
        module.requires_grad_(False)
        scaled.scale.requires_grad_(True)
        return replace(plan, norms=(*plan.norms, ADDED))

    def init_rules(self) -> Sequence[InitRule]:
        """Initialise the scale to one."""
        return (InitRule(pattern=ADDED, distribution="constant", mean=1.0),)
