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

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, attention_core
from nxdt_core.models.attention.sinks import SinkAttention
from nxdt_core.models.random.dropout import CausalAttentionWithDropout

IMPLEMENTATION = "nxdt"
"""Name of the attention function in transformers."""
CORE = "attention_core"
"""Attribute of an attention module that holds its core."""
_NOTED = "noted_calls"
"""Attribute of the modules of a model without cores, whose calls of attention are noted and not computed."""

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "is_causal"}
)
"""Further arguments that models pass, without a meaning for attention that is causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments with which one module calls attention."""

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
    """True if ``document_ids`` reached the call."""
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


def core_for(call: AttentionCall, masks: DocumentMasks) -> nn.Module:
    """Return the core that computes what ``call`` asks for; the plain one wherever that suffices.

    Args:
        call: causal, without unknown arguments, and without dropout where it has a window, a cap, a scale or sinks.
        masks: shared by the cores of a model.
    """
    if call.sinks is not None:
        return SinkAttention(scale=call.scale, window=call.window)
    if call.dropout:
        return CausalAttentionWithDropout(call.dropout, masks)
    scale = None if call.scale == call.key_width**-0.5 else call.scale
    semantics = AttentionSemantics(causal=True, scale=scale, window=call.window, softcap=call.softcap)
    return attention_core(semantics, masks)


class HeadValues(nn.Module):
    """In the place of a parameter [heads, …] of an attention module, so that tensor parallelism can shard it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        """Return the values of this process's heads."""
        return self.weight
