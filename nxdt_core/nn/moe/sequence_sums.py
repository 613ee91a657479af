"""Sums over whole sequences, of which a rank may hold only some tokens, for losses that are not sums over tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from nxdt_core.nn.scoped import Scoped

__all__ = ["SequenceShards", "sequence_shards", "shared_sequences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShards:
    """How the tokens of each sequence are distributed over ranks; by default one rank has them all.

    A loss ``f(Σ over tokens)`` is computed on every rank from :attr:`total`, and each reports ``f × share``: the step
    adds the ranks up.
    """

    ranks: int = 1
    """Number of ranks that share each sequence."""
    total: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial
    """Returns the sum of all ranks' tensors, equal on all of them; differentiable. Collective."""

    @property
    def share(self) -> float:
        """The part that each rank reports of a figure that all ranks have."""
        return 1 / self.ranks


_SHARDS = Scoped(SequenceShards())


def sequence_shards() -> SequenceShards:
    """Return how the sequences of the current batch are distributed over ranks."""
    return _SHARDS.value


def shared_sequences(shards: SequenceShards) -> AbstractContextManager[None]:
    """Make :func:`sequence_shards` return ``shards`` within a block: an engine puts it around the objective."""
    return _SHARDS.set(shards)
