"""Dimensions that are filled up with zeros so that ranks share them in equal parts, and their real elements.

A padded parameter is a DTensor of the padded shape whose parts each begin with real elements and end with zeros. The
zeros stay: layers compute with the real elements only, so that all others have gradients of exactly zero, and no
optimizer moves a zero without a gradient. Checkpoints and initial weights know the real elements alone, at their
places in the whole parameter without padding (:func:`real_part`), and so fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nxdt_core.distributed.placement import piece_of
from nxdt_core.protocols.parallel.piece import Box, Piece

__all__ = ["PaddedDim", "padded_parameters", "real_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedDim:
    """One dimension in equal parts of ``block`` elements, the first ``counts[part]`` of which are real."""

    dim: int
    block: int
    starts: tuple[int, ...]
    """Positions of each part's real elements in the dimension without padding."""
    counts: tuple[int, ...]

    @classmethod
    def of(cls, dim: int, *, block: int, starts: Sequence[int], counts: Sequence[int], unit: int) -> PaddedDim:
        """From numbers of heads of ``unit`` elements each."""
        return cls(
            dim=dim,
            block=block * unit,
            starts=tuple(start * unit for start in starts),
            counts=tuple(count * unit for count in counts),
        )

    @property
    def parts(self) -> int:
        """Ranks, or groups of ranks that hold the same, along the dimension."""
        return len(self.starts)

    @property
    def padded(self) -> bool:
        """Whether there are any zeros."""
        return sum(self.counts) != self.block * self.parts

    def real(self, offset: int, size: int) -> tuple[int, int]:
        """Return where the real elements of ``size`` padded ones at ``offset``, all in one part, begin without padding,
        and how many these are; they come first."""
        part = min(offset // self.block, self.parts - 1)
        within = offset - part * self.block
        count = max(0, min(size, self.counts[part] - within))
        return (self.starts[part] + within if count else 0), count


def padded_parameters(module: nn.Module) -> dict[str, PaddedDim]:
    """Return the padded parameters of a pipeline stage by name, after tensor parallelism was applied."""
    padded: dict[str, PaddedDim] = {}
    for path, part in module.named_modules():
        for leaf, dim in getattr(part, "padded", {}).items():
            padded[f"{path}.{leaf}"] = dim
    return padded


def real_part(tensor: torch.Tensor, padded: PaddedDim) -> Piece:
    """Return the real elements of this rank's part of a padded parameter, or of its optimizer's state.

    Args:
        tensor: of the padded shape; FSDP2 may have sharded it further.
        padded: its entry of :func:`padded_parameters`.

    Returns:
        A view of them, and their place in the whole tensor without padding; it may be empty.
    """
    piece, dim = piece_of(tensor), padded.dim
    offset, count = padded.real(piece.box.offsets[dim], piece.box.shape[dim])

    def with_dim(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    box = Box(with_dim(piece.box.offsets, offset), with_dim(piece.box.shape, count))
    return Piece(piece.tensor.narrow(dim, 0, count), with_dim(piece.shape, sum(padded.counts)), box)
