"""The distribution of a micro-batch's tokens over processes, as far as a router needs it: a slot that engines fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["TokenShards", "WholeMicroBatch", "exclusive_sum"]


class TokenShards(Protocol):
    """Which part of the micro-batch this process has.

    Capacity and load are defined over the whole micro-batch, independent of the ranks that hold its tokens; this is
    what turns counts of one process's tokens into those.
    """

    @property
    def shards(self) -> int:
        """Processes over which the sequences are divided, in equal parts."""
        ...

    @property
    def segments(self) -> int:
        """Runs of neighbouring tokens, of equal length, that this process holds of each sequence."""
        ...

    @property
    def copies(self) -> int:
        """Processes that compute the router on these very tokens and whose gradients are summed."""
        ...

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the counts of this process's segments into their places in the micro-batch. Collective.

        Args:
            counts: int64 [batch, segments, experts].

        Returns:
            ``(before, total)``: what all earlier segments of the micro-batch hold, those of earlier rows included,
            [batch, segments, experts]; and what the whole micro-batch holds, [experts].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMicroBatch:
    """Counts tokens where every rank has the whole micro-batch."""

    copies: int = 1
    """As in :class:`TokenShards`."""
    shards: int = 1
    segments: int = 1

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of :meth:`TokenShards.count`, without communication."""
        return exclusive_sum(counts), counts.sum((0, 1))


def exclusive_sum(counts: torch.Tensor) -> torch.Tensor:
    """``counts`` [batch, segments, experts] of what comes before each segment, rows first."""
    flat = counts.flatten(0, 1)
    return (flat.cumsum(0) - flat).view_as(counts)
