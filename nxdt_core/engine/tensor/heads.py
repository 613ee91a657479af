"""Division of attention heads over tensor parallel ranks: as wholes, each query head with its key's.

Rank r computes query heads r·n … r·n + n−1 and the key and value heads that those attend with. Where there are more
ranks than key and value heads, neighbouring ranks hold copies of one. Where the numbers do not divide, heads of zeros
may fill up: whole groups of them behind the last, or some behind each group's own.

A padded parameter is a DTensor of the padded shape whose parts each begin with real elements and end with zeros. The
zeros stay: layers compute with the real elements only, so that all others have gradients of exactly zero, and no
optimizer moves a zero without a gradient. Checkpoints and initial weights know the real elements alone, at their
places in the whole parameter without padding (:func:`unpadded_shard`), and so fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nxdt_core.distributed.placement import piece_of
from nxdt_core.errors.launch import HeadsDoNotDivide
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.plan import AttentionHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSharding:
    """The heads of one attention block over ``tp`` ranks; ``padded_*`` include heads of zeros."""

    query_heads: int
    kv_heads: int
    tp: int
    padded_kv_heads: int
    padded_group: int
    """Query heads of each key head."""

    @classmethod
    def of(cls, heads: AttentionHeads, tp: int, *, pad: bool = False) -> HeadSharding:
        """Divide ``heads`` over the ranks; ``pad`` adds heads of zeros where the numbers do not divide.

        Raises:
            HeadsDoNotDivide: the ranks would not all have the same number of whole heads of each kind, or a rank's
                query heads would need another rank's keys.
        """
        query, kv = heads.query_heads, heads.kv_heads
        group = query // kv
        padded_kv = _multiple(kv, tp) if tp < kv else next(n for n in range(kv, tp + 1) if tp % n == 0)
        padded_group = _multiple(group, tp // padded_kv) if tp > padded_kv else group
        layout = cls(query_heads=query, kv_heads=kv, tp=tp, padded_kv_heads=padded_kv, padded_group=padded_group)
        reason = layout._reason_against(heads, pad=pad)
        if reason is not None:
            raise HeadsDoNotDivide(query_heads=query, kv_heads=kv, tp=tp, reason=reason)
        return layout

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold a copy of the same key and value heads."""
        return max(1, self.tp // self.padded_kv_heads)

    @property
    def padded(self) -> bool:
        """Return whether heads of zeros are among them."""
        return self.padded_kv_heads * self.padded_group != self.query_heads

    def query(self, dim: int, head_dim: int) -> PaddedDim:
        """Return how the dimension ``dim`` of query heads is divided over the ranks."""
        group = self.query_heads // self.kv_heads
        block = self.padded_kv_heads * self.padded_group // self.tp
        # A rank holds whole groups, or several ranks share a group: in both cases, real heads come first on each rank.
        starts, counts = [], []
        for rank in range(self.tp):
            first_group, within = divmod(rank * block, self.padded_group)
            groups = max(0, min(block // self.padded_group, self.kv_heads - first_group))
            alone = min(block, max(0, group - within)) if first_group < self.kv_heads else 0
            counts.append(groups * group if block >= self.padded_group else alone)
            starts.append(min(first_group, self.kv_heads) * group + min(within, group))
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)

    def key_value(self, dim: int, head_dim: int) -> PaddedDim:
        """Return the same for key and value heads, over the groups of ranks that hold different ones."""
        parts = min(self.tp, self.padded_kv_heads)
        block = self.padded_kv_heads // parts
        starts = [min(part * block, self.kv_heads) for part in range(parts)]
        counts = [min(block, self.kv_heads - start) for start in starts]
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)

    def _reason_against(self, heads: AttentionHeads, *, pad: bool) -> str | None:
        """Return why the heads cannot be divided, as the end of a sentence; None where they can."""
        query, kv, tp = self.query_heads, self.kv_heads, self.tp
        if query % kv:
            return f": {kv} does not divide {query}"
        if self.padded and not pad:
            if kv % tp and tp % kv:
                return f": neither of {kv} and {tp} divides the other"
            return f": {tp} does not divide {query}"
        complete = heads.query and heads.key_value and heads.output
        if (self.padded or self.kv_replicas > 1) and not complete:
            return (
                ": the model's plan does not say which modules make them (query, key_value, output of AttentionHeads)"
            )
        return None


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


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
        """Return the division of heads of ``unit`` elements each, from numbers of heads."""
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
        """Return whether there are any zeros."""
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


def unpadded_shard(tensor: torch.Tensor, padded: PaddedDim) -> Piece:
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
