"""Attention over shared sequences as one operator of autograd and of ``torch.compile``.

A compiled graph has no room for messages on their way, so that it holds the operator whole. Outside of one autograd
calls what is inside: estimates then see what it allocates and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.autograd.function import once_differentiable

from nxdt_core.engine.context.blocks import SharedSequence, documents_named
from nxdt_core.engine.context.exchange import gathered_backward, gathered_forward, ring_backward, ring_forward
from nxdt_core.engine.context.kernels import Gradients, accumulation_dtype

__all__ = ["ContextMethod", "shared_attention"]

ContextMethod = Literal["ring", "gather"]


class _Forward(Protocol):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: SharedSequence
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class _Backward(Protocol):
    def __call__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        sequence: SharedSequence,
    ) -> Gradients: ...


@dataclass(frozen=True, slots=True)
class _Method:
    forward: _Forward
    backward: _Backward


_METHODS: Mapping[str, _Method] = {
    "ring": _Method(ring_forward, ring_backward),
    "gather": _Method(gathered_forward, gathered_backward),
}


def shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor | None,
    *,
    scale: float,
    window: int | None,
    method: ContextMethod,
    group_name: str,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks. Collective, forward and backward.

    Args:
        query: [batch, heads, seq / ranks, head_dim], the rank's zig-zag shard.
        key: [batch, kv_heads, seq / ranks, head_dim].
        value: as ``key``.
        document_ids: int64 [batch, seq / ranks]; None where each row of the batch is one document.
        scale: of the scores.
        window: how many tokens one sees, itself included; None for all before it.
        method: how keys and values travel.
        group_name: of the ranks; :func:`~nxdt_core.engine.context.blocks.documents_over` knows it.

    Returns:
        As ``query``, as wide as ``value``.
    """
    arguments = (query, key, value, document_ids, scale, window, method, group_name)
    output: torch.Tensor
    if torch.compiler.is_compiling():
        output, _ = _attention(*arguments)
    else:
        output = _SharedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def _shared_sequence(
    document_ids: torch.Tensor | None, scale: float, window: int | None, group_name: str
) -> SharedSequence:
    documents = documents_named(group_name)
    chunks = None if document_ids is None else documents(document_ids)
    return SharedSequence(scale=scale, group=documents.group, documents=chunks, window=window)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None,
        scale: float,
        window: int | None,
        method: str,
        group_name: str,
    ) -> torch.Tensor:
        ctx.method, ctx.sequence = method, _shared_sequence(document_ids, scale, window, group_name)
        output, lse = _METHODS[method].forward(query, key, value, ctx.sequence)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradients = _METHODS[ctx.method].backward(grad, query, key, value, output, lse, ctx.sequence)
        return *gradients, None, None, None, None, None


@torch.library.custom_op("nxdt::shared_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor | None,
    scale: float,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    return _METHODS[method].forward(query, key, value, _shared_sequence(document_ids, scale, window, group_name))


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor | None,
    scale: float,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = query.shape
    output = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    return output, query.new_empty((batch, heads, rows), dtype=accumulation_dtype(query.dtype))


@torch.library.custom_op("nxdt::shared_attention_backward", mutates_args=())
def _gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    document_ids: torch.Tensor | None,
    scale: float,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; contiguous, and none a view of another, as operators must give
    them."""
    sequence = _shared_sequence(document_ids, scale, window, group_name)
    of_query, of_key, of_value = _METHODS[method].backward(grad, query, key, value, output, lse, sequence)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


@_gradients.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    document_ids: torch.Tensor | None,
    scale: float,
    window: int | None,
    method: str,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, document_ids, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, document_ids)


def _differentiated(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


_attention.register_autograd(_differentiated, setup_context=_keep)
