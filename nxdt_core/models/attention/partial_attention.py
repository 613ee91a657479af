"""Blocks of an attention matrix: computed one after the other in bounded memory, merged by log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from nxdt_core.distributed.devices import profile_of
from nxdt_core.models.attention.grouped_query import block_rows
from nxdt_core.models.attention.kernels import (
    AttentionKernel,
    ComposedKernel,
    FlashOrEfficientKernel,
    MaskedFlashKernel,
    Scoring,
    accumulation_dtype,
    contiguous_heads,
)

__all__ = ()  # of the core alone

_KERNELS: Mapping[str, AttentionKernel] = {
    "composed": ComposedKernel(),
    "masked_flash": MaskedFlashKernel(),
    "flash_or_efficient": FlashOrEfficientKernel(),
}
"""Kernels by the name that device profiles use."""

_ELEMENTS_AT_A_TIME = 1 << 22
"""Scores, or elements of a mask, that are held at once: 16 MiB of float32 …"""
_ROWS_AT_A_TIME = 128
"""… or those of this many rows, below which matrix products do not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows see only the tokens directly before them."""

    length: int
    """Number of tokens that a row sees, itself included."""
    distance: int
    """Number of tokens from the block's first key to its first row."""

    def first_key(self, row: int) -> int:
        """Return the number of the first key that row number ``row`` sees; negative if it precedes the block."""
        return row + self.distance - self.length + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of the local queries, and those of the keys passed with them that they attend to."""

    rows: slice
    keys: slice
    diagonal: bool = False
    """Row and key number ``i`` of the block are the same token, and later keys are hidden. The first block of a row is
    a diagonal one, in which the row sees at least itself."""
    documents: tuple[torch.Tensor, torch.Tensor] | None = None
    """Document ids [batch, rows] and [batch, keys]; None where all belong together."""
    window: Window | None = None
    """Window of the rows; None without one, and if each row's contains all keys of the block."""


def kernel_for(query: torch.Tensor, value: torch.Tensor, softcap: float | None = None) -> AttentionKernel:
    """Return the kernel that the device's profile names where it takes these tensors, else the composed one, as for
    scores with a ``softcap``.

    Estimates on the meta device meet a fused kernel, since real ones mostly do.
    """
    kernel = _KERNELS["masked_flash" if query.is_meta else profile_of(query.device).attention_kernel]
    return kernel if softcap is None and kernel.takes(query, value) else _KERNELS["composed"]


class MergedAttention:
    """Running output and log-sum-exp over the blocks so far, in at least float32.

    A new part with log-sum-exp b joins what has log-sum-exp a with the weight exp(b) / (exp(a) + exp(b)), which is
    sigmoid(b − a): no exponential overflows.
    """

    def __init__(self, query: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None = None) -> None:
        batch, heads, rows, _ = query.shape
        dtype = accumulation_dtype(query.dtype)
        self._kernel, self._query = kernel_for(query, value, softcap), query
        self._scoring = Scoring(scale=scale, softcap=softcap)
        # Heads innermost but one, as kernels leave it: the output projection then needs no copy.
        self._output = query.new_empty((batch, rows, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)
        self._lse = query.new_empty((batch, heads, rows), dtype=dtype)

    def add(self, block: Block, key: torch.Tensor, value: torch.Tensor) -> None:
        """Attend to ``key`` and ``value`` where ``block`` says, and merge the result into its rows."""
        for rows, keys, scoring in _pieces(block, self._kernel, self._query, self._scoring):
            part, part_lse = self._kernel.forward(self._query[:, :, rows], key[:, :, keys], value[:, :, keys], scoring)
            output, lse = self._output[:, :, rows], self._lse[:, :, rows]
            if block.diagonal:
                output.copy_(part)
                lse.copy_(part_lse)
                continue
            if scoring.visible is not None:  # kernels disagree about rows that see nothing; one says 0
                part_lse = part_lse.masked_fill(~scoring.visible.any(-1), -torch.inf)
            output.lerp_(part.to(output.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
            torch.logaddexp(lse, part_lse, out=lse)

    def result(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the dtype of the queries, and log-sum-exp. The ``sinks`` [heads] are scores without a value."""
        if sinks is not None:
            scores = sinks.detach().to(self._lse.dtype).unsqueeze(-1)
            self._output.mul_(torch.sigmoid(self._lse - scores).unsqueeze(-1))
            torch.logaddexp(self._lse, scores, out=self._lse)
        return self._output.to(self._query.dtype), self._lse


def sink_gradients(grad: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradients of ``sinks`` [heads], from the output's and what :meth:`MergedAttention.result` gave."""
    shares = torch.exp(sinks.detach().to(lse.dtype).unsqueeze(-1) - lse)  # [batch, heads, rows]
    of_scores = shares * (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return of_scores.sum((0, 2)).neg().to(sinks.dtype)


class AttentionGradients:
    """Gradients over the blocks so far, summed in at least float32."""

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        self._kernel, self._scoring = kernel_for(query, value, softcap), Scoring(scale=scale, softcap=softcap)
        self._grad, self._rows_of = contiguous_heads(grad), (query, output, lse)
        self.query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))

    def add(
        self,
        block: Block,
        key: torch.Tensor,
        value: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> None:
        """Add what ``block`` gives to :attr:`query` and, in place, to ``grad_key`` and ``grad_value``, which have the
        shapes of ``key`` and ``value``."""
        query, output, lse = self._rows_of
        for rows, keys, scoring in _pieces(block, self._kernel, query, self._scoring):
            parts = self._kernel.backward(
                self._grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, rows],
                lse[:, :, rows],
                scoring,
            )
            for total, part in zip(
                (self.query[:, :, rows], grad_key[:, :, keys], grad_value[:, :, keys]), parts, strict=True
            ):
                total.add_(part)


def _pieces(
    block: Block, kernel: AttentionKernel, query: torch.Tensor, scoring: Scoring
) -> Iterator[tuple[slice, slice, Scoring]]:
    """Split ``block`` by rows so that neither a mask nor the scores of an unfused kernel grow with the sequence."""
    if kernel.fused and block.documents is None and block.window is None:
        yield block.rows, block.keys, replace(scoring, causal=block.diagonal)
        return
    batch, heads = query.shape[:2]
    rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    step = max(_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME // (batch * keys * (1 if kernel.fused else heads)))
    if block.window is not None:
        step = min(step, block_rows(block.window.length))
    starts = range(0, rows, step)
    if query.is_meta:  # there are no values to compute, and the fullest piece needs the memory that all need
        starts = range(max(0, rows - step), rows, step) if block.diagonal else starts[:1]
    for first in starts:
        last = min(first + step, rows)
        start = 0 if block.window is None else max(0, block.window.first_key(first))
        seen = slice(start, last if block.diagonal else keys)
        if start >= seen.stop:  # and so for the rows that follow
            return
        visible = _visible(block, slice(first, last), seen, query.device)
        yield (
            _within(block.rows, first, last),
            _within(block.keys, start, seen.stop),
            replace(scoring, visible=visible),
        )


def _within(whole: slice, start: int, stop: int) -> slice:
    return slice(whole.start + start, whole.start + stop)


def _visible(block: Block, rows: slice, keys: slice, device: torch.device) -> torch.Tensor | None:
    """Return the mask, bool [batch or 1, 1, rows, keys], of the block's rows ``rows`` and keys ``keys``."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    parts = []
    if block.diagonal:
        parts.append((key <= row)[None, None])
    if block.window is not None:
        parts.append((key >= block.window.first_key(0) + row)[None, None])
    if block.documents is not None:
        of_rows, of_keys = block.documents
        parts.append(of_rows[:, None, rows, None] == of_keys[:, None, None, keys])
    return functools.reduce(torch.logical_and, parts) if parts else None
