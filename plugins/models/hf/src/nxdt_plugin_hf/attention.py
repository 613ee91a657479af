"""Attention of transformers' models through our cores, so that documents, context parallelism and recomputation work.

transformers hands attention to a function that is registered under a name, with the module that asks. Ours passes it
to that module's ``attention_core``. No mask is ever made by the model: it leaves masks alone where the implementation
has no function for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention
from nxdt_core.models.attention.sinks import SinkAttention
from nxdt_core.models.random.dropout import CausalAttentionWithDropout
from nxdt_core.protocols.step_context import StepContext

IMPLEMENTATION = "nxdt"
"""Name of the attention function in transformers."""
CORE = "attention_core"
"""Attribute of an attention module that holds its core."""
_NOTED = "noted_calls"
"""Attribute of the modules of a model without cores, whose calls of attention are noted and not computed."""

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "is_causal"}
)
"""What else models pass, without a meaning for attention that is causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one attention module asks for."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    """Tokens that are seen, the own included; None: all earlier ones."""
    softcap: float | None
    """Scores are ``softcap · tanh(score / softcap)``."""
    dropout: float
    sinks: str | None
    """Name of the module's parameter with a score per head that has no value; None: there is none."""
    causal: bool
    documents: bool
    """Whether ``document_ids`` came through."""
    unknown: tuple[str, ...]
    """Arguments that no core of ours honours."""


def register() -> None:
    """Register :data:`IMPLEMENTATION` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)


def note_calls(model: nn.Module) -> dict[nn.Module, AttentionCall]:
    """Return the mapping in which attention modules of ``model``, which have no cores, note what they ask for."""
    noted: dict[nn.Module, AttentionCall] = {}
    for module in model.modules():
        setattr(module, _NOTED, noted)
    return noted


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    document_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, heads, seq, width] each to [batch, seq, heads, width]."""
    core = getattr(module, CORE, None)
    if core is not None:
        sinks = {} if s_aux is None else {"sinks": s_aux()}
        attended: torch.Tensor = core(query, key, value, document_ids, **sinks)
        return attended.transpose(1, 2).contiguous(), None  # of which some models take a view
    unknown = {name for name, given in others.items() if given is not None and name not in _HARMLESS}
    own = next((name for name, parameter in module.named_parameters(recurse=False) if parameter is s_aux), None)
    if s_aux is not None and own is None:
        unknown.add("s_aux")
    getattr(module, _NOTED)[module] = AttentionCall(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_width=query.shape[-1],
        value_width=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
        sinks=own,
        causal=bool(others.get("is_causal", getattr(module, "is_causal", True))),
        documents=document_ids is not None,
        unknown=tuple(sorted(unknown | ({"attention_mask"} if attention_mask is not None else set()))),
    )
    return value.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None


def attention_core(call: AttentionCall, masks: DocumentMasks) -> nn.Module:
    """Return the core that computes what ``call`` asks for; the plain one wherever that suffices.

    Args:
        call: causal, without unknown arguments, and without dropout where it has a window, a cap, a scale or sinks.
        masks: shared by the cores of a model.
    """
    if call.sinks is not None:
        return SinkAttention(scale=call.scale, window=call.window)
    if call.dropout:
        return CausalAttentionWithDropout(call.dropout, masks)
    if call.softcap is not None:
        return CappedAttention(call.scale, call.softcap, masks, window=call.window)
    if call.scale != call.key_width**-0.5:
        return ScaledAttention(call.scale, masks, window=call.window)
    return CausalAttention(masks, window=call.window)


class HeadValues(nn.Module):
    """In the place of a parameter [heads, …] of an attention module, so that tensor parallelism can shard it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        """Return the values of this process's heads."""
        return self.weight


class ScaledAttention(CausalAttention):
    """The plain core with a custom scale."""

    def __init__(self, scale: float, masks: DocumentMasks, *, window: int | None = None) -> None:
        super().__init__(masks, window=window)
        self.scale = scale

    def semantics(self) -> AttentionSemantics:
        """Return the base's semantics with the scale."""
        return AttentionSemantics(causal=True, scale=self.scale, window=self.window)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return :meth:`CausalAttention.forward` with the model's scale."""
        query = query * (self.scale * query.shape[-1] ** 0.5)
        return super().forward(query, key, value, document_ids, step)


class CappedAttention(nn.Module):
    """Causal attention with scores ``cap · tanh(score / cap)`` (Gemma 2, arXiv:2408.00118), composed, since fused
    kernels have no room for the cap."""

    def __init__(self, scale: float, cap: float, masks: DocumentMasks, *, window: int | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.cap = cap
        self.window = window
        self.masks = masks

    def semantics(self) -> AttentionSemantics:
        """Return what :meth:`forward` computes."""
        return AttentionSemantics(causal=True, scale=self.scale, window=self.window, softcap=self.cap)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return what :meth:`CausalAttention.forward` defines, with the additions of this class."""
        batch, heads, seq, width = query.shape
        grouped = query.view(batch, key.shape[1], -1, seq, width)  # [batch, kv_heads, group, seq, head_dim]
        scores = torch.tanh(grouped @ key.unsqueeze(2).transpose(-1, -2) * (self.scale / self.cap)) * self.cap
        scores = scores + self._mask(query, document_ids, step).unsqueeze(2)
        weights = functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        attended: torch.Tensor = weights.to(query.dtype) @ value.unsqueeze(2)
        return attended.view(batch, heads, seq, -1)

    def made(self, document_ids: torch.Tensor, dtype: torch.dtype) -> tuple[str, Any]:
        """Return what :meth:`forward` will ask of the masks."""
        return self.masks.MASK, self.masks(document_ids, dtype)

    def _mask(self, query: torch.Tensor, document_ids: torch.Tensor | None, step: StepContext | None) -> torch.Tensor:
        """Additive [batch or 1, 1, seq, seq]."""
        seq = query.shape[2]
        every = torch.ones(seq, seq, dtype=torch.bool, device=query.device)
        if document_ids is not None:
            mask = self.masks(document_ids, query.dtype, step)
        else:
            mask = torch.zeros(1, 1, seq, seq, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill_(every.triu(1), float("-inf"))
        if self.window is None or self.window >= seq:
            return mask
        return mask.masked_fill(every.tril(-self.window), float("-inf"))
