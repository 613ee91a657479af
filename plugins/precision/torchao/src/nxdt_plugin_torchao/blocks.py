"""Tensors in 8 bits per element and a float32 scaling factor per block (Dettmers et al. 2022, arXiv:2110.02861).

The map from codes to numbers is torchao's. Two things are chosen so that what was restored is quantised to the same
codes and scaling factors again, bitwise, which lets checkpoints have float32:

- The scaling factor is the block's element of the largest magnitude with its sign. Divided by it, this element is 1,
  which the map has. It does not have -1.
- Blocks are parts of rows of the whole tensor. They are the same on each layout that cuts rows at their borders.

Squares that are not 0 are never rounded to 0, since AdamW divides by their root.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from nxdt_core.protocols.optimizer import ParameterShard

_LOGGERS = ("torchao", "torch.utils._pytree")
"""They warn of extensions for other devices, and of torchao's own use of torch's pytrees."""


_LEAST = 1e-30
"""Least magnitude of a scaling factor: its products with the map are normal numbers of float32."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Let an import of torchao within the block log errors alone."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


with without_warnings():
    from torchao.optim.quant_utils import create_dynamic_map


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Division of a shard's rows into blocks."""

    size: int
    before: int
    """Elements of the first block that another rank has."""
    width: int
    """Elements of a row here."""

    @classmethod
    def of(cls, shard: ParameterShard, width: int, size: int) -> RowBlocks:
        """Return the blocks of ``size`` elements; ``width`` counts elements that fill a row up, too."""
        return cls(size, shard.region.offsets[-1] % size, width)

    @property
    def count(self) -> int:
        """Return the number of blocks of a row."""
        return math.ceil((self.before + self.width) / self.size)

    def divide(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., width] as [..., count, size], with zeros where a block is not full."""
        after = self.count * self.size - self.before - self.width
        if self.before or after:
            rows = functional.pad(rows, (self.before, after))
        return rows.reshape(*rows.shape[:-1], self.count, self.size)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the rows that :meth:`divide` made ``blocks`` of."""
        return blocks.flatten(-2)[..., self.before : self.before + self.width]


def quantised(rows: torch.Tensor, blocks: RowBlocks, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, uint8 [..., width], and the scaling factors, float32 [..., count], of ``rows``.

    Without ``signed`` no element is below 0.
    """
    divided = blocks.divide(rows)
    largest = divided.abs().argmax(-1, keepdim=True)
    scales = divided.gather(-1, largest).float()
    scales = torch.where(scales.abs() < _LEAST, _LEAST, scales)
    _, borders = _map(signed, rows.device)
    codes = torch.bucketize((divided / scales).float(), borders, out_int32=True, right=True)
    return blocks.join(codes.to(torch.uint8)), scales.squeeze(-1)


def dequantised(codes: torch.Tensor, scales: torch.Tensor, blocks: RowBlocks, *, signed: bool) -> torch.Tensor:
    """Return the float32 rows of :func:`quantised`."""
    values, _ = _map(signed, codes.device)
    return blocks.join(blocks.divide(values[codes.int()]) * scales.unsqueeze(-1))


@cache
def _map(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each code, ascending, and the least number that is rounded to each code but the first."""
    with torch.device("cpu"):
        values = torch.tensor(create_dynamic_map(signed=signed))
        borders = (values[:-1] + values[1:]) / 2
    if not signed:
        borders[0] = torch.finfo(torch.float32).tiny
    return values.to(device), borders.to(device)
