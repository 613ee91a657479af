"""Quantiles of the normal distribution by a table of polynomials.

Only products and sums follow a look-up, and every device rounds these in the same way. All device types with float64
therefore get the same bits. torch's ``special.ndtri`` computes element by element on a CPU, and takes twice as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nxdt_core.distributed.devices import HOST

__all__ = ["normal_quantiles", "quantile_table"]

_BITS = 8
"""Each octave of probabilities has 2⁸ polynomials."""
_DEGREE = 4
"""Of the polynomials, whose error is then below 1e-14, as that of ``ndtri`` is."""
_ENTRIES = 64 << _BITS
"""Number of octave and polynomial, modulo 64 octaves. Probabilities from 2⁻⁵³ to a half have 52."""
_FRACTION = (1 << (52 - _BITS)) - 1
"""Bits of a float64 below those that number the polynomials of an octave."""
_ONE = 0x3FF << 52
"""Bits of 1 as float64."""


def quantile_table(device: torch.device) -> torch.Tensor:
    """Return coefficients of quantile / probability, float64 [degree + 1, entries], constants first.

    The variable is the distance from a polynomial's middle, where probabilities are scaled to [1, 2).
    """
    return torch.from_numpy(_coefficients()).to(device)


@functools.cache
def _coefficients() -> NDArray[np.float64]:
    """Memory that stays, 640 KiB, and no tensor, so that the tensors of a process are those of its run."""
    first = torch.arange((1023 - 53) << _BITS, (1023 - 1) << _BITS, device=HOST)
    begins, ends = ((numbers << (52 - _BITS)).view(torch.float64) for numbers in (first, first + 1))
    powers = torch.arange(_DEGREE + 1, dtype=torch.float64, device=HOST)
    nodes = torch.cos((powers + 0.5) * (math.pi / (_DEGREE + 1)))  # of Chebyshev, in (-1, 1)
    probabilities = begins + (ends - begins) * (nodes.unsqueeze(1) + 1) / 2
    values = torch.special.ndtri(probabilities) / probabilities
    found = torch.linalg.solve(nodes.unsqueeze(1) ** powers, values)
    table = np.zeros((_DEGREE + 1, _ENTRIES))
    table[:, (first % _ENTRIES).numpy()] = (found * (2.0 ** (_BITS + 1)) ** powers.unsqueeze(1)).numpy()
    return table


def normal_quantiles(
    tails: torch.Tensor, table: torch.Tensor, *, words: Sequence[torch.Tensor], spare: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the quantile of each probability, float64 in the first of ``spare``.

    Args:
        tails: float64, from 2⁻⁵³ to a half: of what is below; where negative, of what is above.
        table: :func:`quantile_table`, on their device.
        words: two buffers of int64.
        spare: two buffers of float64.
    """
    index, offset = words
    result, found = spare
    bits = tails.view(torch.int64)
    torch.bitwise_right_shift(bits, 52 - _BITS, out=index).bitwise_and_(_ENTRIES - 1)
    torch.bitwise_and(bits, _FRACTION, out=offset).bitwise_or_(_ONE)
    distance = offset.view(torch.float64).sub_(1 + 2.0 ** -(_BITS + 1))
    *others, highest = table.unbind()
    torch.index_select(highest, 0, index, out=result)
    for coefficients in reversed(others):
        result.mul_(distance).add_(torch.index_select(coefficients, 0, index, out=found))
    return result.mul_(tails)
