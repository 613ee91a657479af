"""Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551) of float32 to bfloat16, by position.

A value between two neighbours goes to the upper one with the probability that makes its mean exact. Sums of steps that
are each too small for bfloat16 then come out right, where rounding to the nearest loses every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nxdt_core.nn.positions import positions
from nxdt_core.nn.streams import Stream

__all__ = ["round_into"]

_LOW_BITS = 0xFFFF
"""What a float32 has and a bfloat16 has not."""


@torch.no_grad()
def round_into(
    target: torch.Tensor, values: torch.Tensor, stream: Stream, *, shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Round ``values`` into ``target``, each by the stream's number at its place in the whole parameter.

    Exact up to the 2⁻¹⁶ of a step that float32 resolves there; what bfloat16 can represent stays as it is, and so do
    infinities and NaN.

    Args:
        target: of the shape of ``values``; bfloat16, or float32, perhaps ``values`` itself.
        values: float32; overwritten.
        stream: of this parameter and step.
        shape: of the whole parameter.
        offsets: where the block starts in it, one number a dimension.
    """
    flat = values.contiguous().view(-1)
    bits = flat.view(torch.int32)
    for part, indices in positions(shape, offsets, values.shape, device=values.device):
        noise = stream.bits(indices).bitwise_and_(_LOW_BITS).to(torch.int32)
        noise.masked_fill_(flat[part].isnan(), 0)  # a NaN of all ones would overflow into a zero
        bits[part].add_(noise).bitwise_and_(~_LOW_BITS)
    target.copy_(flat.view(values.shape))
