"""Errors of context parallelism: codes ``NXDT-P06…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "AttentionCoreMissing",
    "AttentionCoreUnknown",
    "ContextSequenceDoesNotDivide",
    "RingNeedsPointToPoint",
]


class ContextSequenceDoesNotDivide(NxdtError):
    """A sequence that does not fall into two equal chunks for each context parallel rank."""

    code = "NXDT-P060"
    happened = (
        "A sequence of {length} tokens does not fall into {chunks} equal chunks, two for each of {ranks} context "
        "parallel ranks."
    )
    remedy = (
        "Make data.seq_length a multiple of {chunks} ({next_length}, say), or change "
        "distributed_strategy.context_parallel_size."
    )
    length: int
    ranks: int

    def _view(self) -> dict[str, Any]:
        chunks = 2 * self.ranks
        next_length = max(1, -(-self.length // chunks)) * chunks
        return {**super()._view(), "chunks": chunks, "next_length": next_length}


class AttentionCoreMissing(NxdtError):
    """A model whose attention context parallelism cannot find."""

    code = "NXDT-P061"
    happened = "distributed_strategy.context_parallel_size is {ranks}, and the model's plan names {found}."
    remedy = (
        "Name the model's attention cores in ParallelPlan.attention_cores, or train it with "
        "distributed_strategy.context_parallel_size=1."
    )
    patterns: tuple[str, ...]
    ranks: int

    def _view(self) -> dict[str, Any]:
        found = f"attention cores that it does not have: {listing(self.patterns)}" if self.patterns else "no attention"
        return {**super()._view(), "found": found}


class AttentionCoreUnknown(NxdtError):
    """An attention core whose mask context parallelism cannot shard."""

    code = "NXDT-P062"
    happened = "The attention core '{path}' ({core}) cannot be computed in parts: {reason}."
    remedy = (
        "Context parallelism computes softmax(scale q kᵀ) v over earlier tokens of the same document: let a core that "
        "does just that say so in semantics(), as nxdt_core.nn.attention.CausalAttention does; train others with "
        "distributed_strategy.context_parallel_size=1."
    )
    path: str
    core: str
    reason: str


class RingNeedsPointToPoint(NxdtError):
    """Ring attention on devices that cannot send to each other."""

    code = "NXDT-P063"
    happened = (
        "distributed_strategy.context_parallel_method is ring, and devices of type '{device_type}' cannot send to each "
        "other without the rest of their group."
    )
    remedy = "Write distributed_strategy.context_parallel_method: gather, or leave the key out."
    device_type: str
