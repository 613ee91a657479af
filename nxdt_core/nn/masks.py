"""Dropout masks by position: which elements of a token's features are kept follows from the run's seed, the step, the
module, the row of the global batch and the place in the sequence. No layout changes it.

The mask of a row is drawn whole, [sequence, features], and each process takes its part. That is more to draw where a
process has a part of the row alone, and needs a byte an element; a function of each element, as for initial weights,
would cost more than the layer that the dropout stands before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

__all__ = ["MaskPart", "draws_of_step", "rows_of_batch", "same_draws"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPart:
    """A process's part of the mask of one row, for one module; filled by engines."""

    name: str
    """Of the module in the whole model."""
    whole_length: Callable[[int], int]
    """Length of the sequence from that of this process's part."""
    tokens: Callable[[torch.Tensor], torch.Tensor]
    """From a mask [sequence, features] to the tokens that this process holds between tensor blocks' collectives."""
    sequence_parts: tuple[int, int] = (0, 1)
    """Which of how many further parts of these tokens it holds under sequence parallelism."""
    features: tuple[int, int] | None = None
    """Where its features begin, and how many the whole has; None where that is not said."""
    feature_parts: tuple[int, int] = (0, 1)
    """Otherwise: which of how many equal parts of the features it holds."""

    def mask(self, hidden: torch.Tensor, p: float) -> torch.Tensor | None:
        """Return what is kept of ``hidden`` [rows, tokens, features], of its shape; None where no row is known."""
        step, batch = _STEP.get(), _ROWS.get()
        if step is None or batch is None or hidden.is_meta or hidden.dim() != 3:
            return None
        part, parts = self.sequence_parts
        first, rows, tokens = batch
        if hidden.shape[0] != rows or hidden.shape[1] not in (tokens, tokens // parts):
            return None
        split = hidden.shape[1] != tokens
        own_part, feature_parts = self.feature_parts
        width = hidden.shape[2]
        begin, features = self.features or (own_part * width, feature_parts * width)
        generator = torch.Generator(hidden.device)
        kept = torch.ones(hidden.shape, dtype=torch.bool, device=hidden.device)
        for row in range(rows):
            generator.manual_seed(_seed(*step, self.name, first + row))
            whole = torch.empty(self.whole_length(tokens), features, dtype=torch.bool, device=hidden.device)
            own = self.tokens(whole.bernoulli_(1 - p, generator=generator))
            own = own.tensor_split(parts)[part] if split else own
            own = own[:, begin : begin + width]
            kept[row, :, : own.shape[1]] = own  # features that fill a dimension up are zero anyway
        return kept


_STEP: ContextVar[tuple[int, int] | None] = ContextVar("nxdt_mask_step", default=None)
"""Seed and number of the step."""
_ROWS: ContextVar[tuple[int, int, int] | None] = ContextVar("nxdt_mask_rows", default=None)
"""First row of the micro-batch in the global batch, its rows, and its tokens a row in this process."""


@contextmanager
def draws_of_step(seed: int, step: int) -> Iterator[None]:
    """Around all forward passes of a training step."""
    token = _STEP.set((seed, step))
    try:
        yield
    finally:
        _STEP.reset(token)


@contextmanager
def rows_of_batch(first: int | None, ids: torch.Tensor) -> Iterator[None]:
    """Around the forward of a micro-batch: ``ids`` [rows, tokens] begin at row ``first`` of the global batch."""
    token = _ROWS.set(None if first is None else (first, ids.shape[0], ids.shape[1]))
    try:
        yield
    finally:
        _ROWS.reset(token)


def same_draws() -> AbstractContextManager[None]:
    """Return a context in which masks are those of here and now, for a forward that is computed again in backward."""
    return _as_then(_STEP.get(), _ROWS.get())


@contextmanager
def _as_then(step: tuple[int, int] | None, rows: tuple[int, int, int] | None) -> Iterator[None]:
    tokens = _STEP.set(step), _ROWS.set(rows)
    try:
        yield
    finally:
        _STEP.reset(tokens[0])
        _ROWS.reset(tokens[1])


def _seed(seed: int, step: int, name: str, row: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{step}\0{name}\0{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
