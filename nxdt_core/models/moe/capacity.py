"""Which assignments an expert of bounded capacity takes: the first ones by position in the micro-batch."""

from __future__ import annotations

import math

import torch

from nxdt_core.models.moe.token_shards import exclusive_sum

__all__ = ["expert_capacity", "slots_within"]


def expert_capacity(factor: float, *, tokens: int, top_k: int, experts: int) -> int:
    """Return how many assignments of a micro-batch an expert takes: ``factor`` times its equal share, rounded up."""
    share = factor * tokens * top_k / experts
    return math.ceil(share - 1e-9 * share)  # 1.1 · 10 is 11.000000000000002


def slots_within(capacity: int, segments: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Number the assignments to each expert, and refuse those over capacity.

    Refused assignments come last in the micro-batch. This process therefore keeps the first of its assignments to an
    expert, and their numbers have no gaps.

    Args:
        capacity: of each expert, for the micro-batch.
        segments: int64 [batch, segments, tokens, experts], 1 where a token chose the expert.
        before: int64 [batch, segments, experts], assignments in earlier segments of the whole micro-batch.

    Returns:
        int64 [batch, segments, tokens, experts]: the number, from 0, among this process's assignments to the expert;
        −1 where it is refused. Meaningless where the token did not choose the expert.
    """
    in_segment = segments.cumsum(2) - 1
    here = in_segment + exclusive_sum(segments.sum(2)).unsqueeze(2)
    return torch.where(in_segment + before.unsqueeze(2) < capacity, here, -1)
