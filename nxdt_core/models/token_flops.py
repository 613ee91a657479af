"""Floating-point operations of one training token, in the two conventions that the field reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from nxdt_core.distributed.devices import meta_device
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder

_NODES = 4096
"""Positions at which the cost is asked for; it is taken as linear between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Operations of the forward and backward pass of one token, without recomputation."""

    strict: float
    """Operations that mathematics needs: attention to earlier positions only, and no gradients of frozen weights."""
    palm: float
    """Convention of PaLM (arXiv:2204.02311, appendix B): attention to all positions, every weight trained."""


def token_flops(builder: ModelBuilder, sequence_length: int, adapters: Sequence[Adapter] = ()) -> TokenFlops:
    """Return the operations per token of a model that trains on full sequences, averaged over their positions.

    A weight that a token is multiplied with costs 6 operations where it trains, and 4 where it is frozen: forward, and
    the gradient of its input. The boundaries of packed documents are not known here, so they are not considered.

    Args:
        builder: of the model; :meth:`~nxdt_core.protocols.model.ModelBuilder.flops_per_token` is in PaLM's convention.
        sequence_length: positions per sequence.
        adapters: what changes and freezes the model before training.
    """
    # The mean over all positions of the cost of a token that sees itself and what precedes it.
    steps = min(_NODES, sequence_length)
    last, low = 1, builder.flops_per_token(1)
    total = low
    for index in range(1, steps):
        first, last = last, 1 + (sequence_length - 1) * index // max(1, steps - 1)
        high = builder.flops_per_token(last)
        total += (last - first) * (low + high) / 2 + (high - low) / 2  # the sum of a line over first + 1 … last
        low = high
    strict = total / sequence_length
    if adapters:
        with meta_device():
            module, plan = builder.build(), builder.plan()
            before = {id(weight) for weight in _multiplied(module)}
            for adapter in adapters:
                plan = adapter.apply(module, plan)
        base = added = frozen = 0
        for weight in _multiplied(module):
            size = weight.numel()
            if id(weight) in before:
                base, frozen = base + size, frozen + size * (not weight.requires_grad)
            else:
                added += size
        one, two = builder.flops_per_token(1), builder.flops_per_token(2)
        strict += 6.0 * added - (2 * one - two) * (frozen / max(1, base)) / 3
    return TokenFlops(strict=strict, palm=builder.flops_per_token(sequence_length))


def _multiplied(module: nn.Module) -> list[nn.Parameter]:
    """Weights that tokens are multiplied with; rows of an embedding are looked up."""
    weights = {
        id(weight): weight
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
        if weight.ndim > 1
    }
    return list(weights.values())
