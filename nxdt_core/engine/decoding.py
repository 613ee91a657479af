"""Generation with a cache of keys and values, in every layout but that of context parallelism.

Each pass sends the new tokens alone through the stages of a pipeline and the shards of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.engine.context.apply import core_semantics
from nxdt_core.errors.base import NxdtError
from nxdt_core.models.attention.cache import AttentionSlot, KeyValueCache
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.rotary import RotaryEmbedding
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["CachedDecoding", "attention_slots", "last_rows_only", "positions_that_change"]


def attention_slots(modules: Sequence[nn.Module], plan: ParallelPlan) -> list[AttentionSlot] | str:
    """Return the attention cores of a rank's stages, or why keys and values cannot be kept for them."""
    if not plan.attention_cores:
        return "the model's plan names no attention cores"
    slots = []
    for module in modules:
        for path, core in module.named_modules():
            if matches_any(plan.attention_cores, path):
                parent, _, name = path.rpartition(".")
                try:
                    slots.append((module.get_submodule(parent), name, core_semantics(path, core)))
                except NxdtError as error:
                    return error.what().rstrip(".")
    return slots


def positions_that_change(modules: Sequence[nn.Module], lengths: Sequence[int], columns: int) -> str | None:
    """Return why the keys of texts of ``lengths`` change while these grow to ``columns`` tokens; None: they stay."""
    for part in (part for module in modules for part in module.modules() if isinstance(part, RotaryEmbedding)):
        if not part.kept(min(lengths), columns):
            return f"the rotary frequencies change where a text outgrows {part.original} tokens"
    return None


@contextmanager
def last_rows_only(modules: Sequence[nn.Module], plan: ParallelPlan, index: int) -> Iterator[None]:
    """Let heads compute the logits of token ``index`` of each row alone within the block."""
    heads = [path for path, style in plan.tensor.items() if style == "vocab_head"]
    handles = [
        part.register_forward_pre_hook(lambda _, args: (args[0][:, index : index + 1], *args[1:]))
        for module in modules
        for path, part in module.named_modules()
        if matches_any(heads, path) and not isinstance(part, nn.Identity)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
class CachedDecoding:
    """A :class:`nxdt_core.protocols.parallel_model.Decoding`."""

    def __init__(
        self,
        cache: KeyValueCache,
        last_logits: Callable[[Batch, int, KeyValueCache], torch.Tensor],
        multiple: int,
    ) -> None:
        """
        Args:
            cache: of this rank's layers.
            last_logits: of a batch and the number of its columns that count: runs the model, extends the cache, and
                returns the logits [rows, vocab] of the last of these columns.
            multiple: what the columns of a pass must be a multiple of.
        """
        self._cache, self._last_logits, self._multiple = cache, last_logits, multiple

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocab] behind ``input_ids`` [rows, tokens]."""
        tokens = input_ids.shape[1]
        padded = functional.pad(input_ids, (0, -tokens % self._multiple))  # no token sees a later one
        positions, documents = self._cache.places(padded.shape[1])
        positions[:, tokens:] = 0  # a text is no longer for what fills it up
        batch = Batch(input_ids=padded, labels=padded, position_ids=positions, document_ids=documents)
        return self._last_logits(batch, tokens, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only."""
        self._cache.keep(rows)
