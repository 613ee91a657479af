"""A small mixture-of-experts decoder made of ``nxdt_core.models``, for tests of layouts: the target of a model
component.

Register it as ``ModelComponent(name="moe-test", target="nxdt_testing.models.moe:MoEBuilder",
config="nxdt_testing.models.moe_config:MoEModelConfig", …)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.models.loss.cross_entropy import head_output
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.rotary import RotaryEmbedding
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.plan import AttentionHeads, ExpertPlan, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_core.protocols.step_context import StepContext
from nxdt_testing.models.moe_config import MoEModelConfig

__all__ = ["MoEBuilder", "MoEDecoder"]

_NORMS = ("layers.*.attention_norm", "layers.*.moe_norm", "norm")


class MoEDecoder(nn.Module):
    """Embedding, layers with global numbers, norm, head."""

    def __init__(self, config: MoEModelConfig) -> None:
        super().__init__()
        masks = DocumentMasks()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.hidden_size // config.num_attention_heads)
        self.layers = nn.ModuleDict({str(n): MoELayer(config, masks) for n in range(config.num_layers)})
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` int64 [batch, seq]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotary = self.rotary(position_ids)
        hidden = self.embed_tokens(input_ids)  # [batch, seq, hidden]
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, document_ids, step=step)
        return head_output(self.lm_head, self.norm(hidden), step)


class MoELayer(nn.Module):
    """Attention and mixture of experts, each normalised before and added to the residual stream."""

    def __init__(self, config: MoEModelConfig, masks: DocumentMasks) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            core=CausalAttention(masks),
        )
        self.moe_norm = RMSNorm(config.hidden_size)
        self.moe = _mixture(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, document_ids, step)
        mixed: torch.Tensor = self.moe(self.moe_norm(hidden), step)
        return hidden + mixed


class MoEBuilder:
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

    def build(self) -> MoEDecoder:
        """Return the whole model."""
        return MoEDecoder(self.config)

    def plan(self) -> ParallelPlan:
        """Return a plan that allows every kind of parallelism."""
        attention, moe = "layers.*.attention", "layers.*.moe"
        return ParallelPlan(
            tensor={
                "embed_tokens": "vocab_embedding",
                **{f"{attention}.{name}_proj": "column" for name in "qkv"},
                f"{attention}.o_proj": "row",
                **self._shared(moe),
                "lm_head": "vocab_head",
            },
            tensor_blocks=(attention, moe, "lm_head"),
            sequence_norms=_NORMS,
            heads=AttentionHeads(
                query_heads=self.config.num_attention_heads,
                kv_heads=self.config.num_kv_heads,
                query=(f"{attention}.q_proj",),
                key_value=(f"{attention}.k_proj", f"{attention}.v_proj"),
                output=(f"{attention}.o_proj",),
            ),
            pipeline=PipelinePlan(hidden_size=self.config.hidden_size),
            attention_cores=(f"{attention}.core",),
            experts=ExpertPlan(
                modules=(f"{moe}.experts",),
                tensor={
                    f"{moe}.experts.gate_proj": "column",
                    f"{moe}.experts.up_proj": "column",
                    f"{moe}.experts.down_proj": "row",
                },
                dispatchers=(f"{moe}.dispatcher",),
                routers=(f"{moe}.router",),
            ),
            recompute={"CoreAttention": (f"{attention}.core",), "MixtureOfExperts": (moe,)},
            norms=tuple(f"{norm}.weight" for norm in _NORMS),
            no_weight_decay=(),
        )

    def init_rules(self) -> Sequence[InitRule]:
        """Ones for norms, normal for matrices."""
        return (
            *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=1.0) for norm in _NORMS),
            InitRule(pattern="*", distribution="normal", std=self.config.init_method_std),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """6 for each weight that a token meets, and 12 for each layer, query channel and position."""
        c = self.config
        head_dim = c.hidden_size // c.num_attention_heads
        ffn = c.moe.top_k * c.ffn_hidden_size + c.moe.shared_ffn_hidden_size
        attention = 2 * (c.num_attention_heads + c.num_kv_heads) * head_dim
        layer = c.hidden_size * (attention + 3 * ffn + c.moe.num_experts)
        weights = c.num_layers * layer + c.vocab_size * c.hidden_size
        return 6.0 * weights + 12.0 * c.num_layers * c.hidden_size * sequence_length

    def _shared(self, moe: str) -> dict[str, TensorStyle]:
        """Patterns of a plan that match nothing are an error, so these come with the block alone."""
        if not self.config.moe.shared_ffn_hidden_size:
            return {}
        shared = f"{moe}.shared"
        return {f"{shared}.gate_proj": "column", f"{shared}.up_proj": "column", f"{shared}.down_proj": "row"}


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
