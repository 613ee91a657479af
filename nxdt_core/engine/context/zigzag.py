"""Which tokens a context parallel rank holds: chunks ``r`` and ``2n - 1 - r`` of ``2n``, an early and a late one.

Under a causal mask the tokens of a late chunk see many keys and those of an early one few; a rank with one of each has
as much to do as any other. (Cut into ``n`` plain pieces, the last rank would compute twice the mean.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["chunks_of", "in_order", "runs_of", "shard_of"]


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the two chunks of ``rank``, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def runs_of(rank: int, ranks: int, length: int) -> list[int]:
    """Return where the chunks of ``rank`` begin and end in a sequence of ``length``, as :attr:`MaskPart.runs` gives
    them."""
    chunk = length // (2 * ranks)
    return [at for number in chunks_of(rank, ranks) for at in (number * chunk, (number + 1) * chunk)]


def shard_of(tensor: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """Return the part of ``tensor`` that ``rank`` holds; ``dim`` must divide by twice the ranks."""
    chunks = tensor.tensor_split(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim)


def in_order(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the whole sequence from the parts of all ranks: the inverse of :func:`shard_of`."""
    early, late = zip(*(shard.tensor_split(2, dim) for shard in shards), strict=True)
    return torch.cat((*early, *reversed(late)), dim)
