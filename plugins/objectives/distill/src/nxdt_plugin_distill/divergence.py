"""Divergences between two models' distributions of each token, in every layout of the vocabulary and in bounded memory.

In addition to the logits of both models only the gradient of one is held whole: full-precision copies of some rows
exist at a time. Where ranks share the vocabulary, each row needs six numbers of each rank in forward, and two sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import all_to_all, gather_along, reduce_from_group
from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.models.loss import row_chunks

_COPIES = 4
"""Tensors in full precision for each chunk: both models' rows, and two of what is computed from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Divergence between teacher and student."""

    beta: float = 0.0
    """0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: their generalized Jensen-Shannon divergence."""
    temperature: float = 1.0
    tokens: int | None = None
    """Columns of logits that are tokens of both models; those behind them are left out of both. None: all."""

    @property
    def shares(self) -> tuple[float, float]:
        """Return the weights of the teacher's divergence and of the student's; a KL is one of them."""
        return (self.beta, 1 - self.beta) if self._mixes else (1 - self.beta, self.beta)

    @property
    def _mixes(self) -> bool:
        return 0 < self.beta < 1

    def between(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor | None:
        """Return the logarithm of the mixture of two distributions, given theirs; None for a KL, which has none."""
        if not self._mixes:
            return None
        return torch.logaddexp(student + math.log1p(-self.beta), teacher + math.log(self.beta))

    def columns(self, logits: torch.Tensor) -> int:
        """Return how many of this rank's columns of ``logits`` are tokens."""
        width, group = _local(logits).shape[-1], _group(logits)
        if self.tokens is None:
            return width
        first = 0 if group is None else group.rank() * width
        return min(max(self.tokens - first, 0), width)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The likeliest tokens of each row, equal on all ranks that share the vocabulary."""

    logits: torch.Tensor
    """[rows, k], in float32 or float64."""
    ids: torch.Tensor
    """int64 [rows, k]"""

    @classmethod
    def of(cls, logits: torch.Tensor, k: int, measure: Measure) -> TopTokens:
        """Return those of ``logits`` [..., vocab]. Collective where ranks share the vocabulary."""
        local, group = _rows(logits), _group(logits)
        columns = local[:, : measure.columns(logits)]
        dtype = torch.promote_types(local.dtype, torch.float32)
        values = columns.new_full((len(local), k), _nothing(dtype), dtype=dtype)
        ids = torch.zeros_like(values, dtype=torch.int64)
        top = torch.topk(columns, min(k, columns.shape[1]), dim=1)
        values[:, : top.values.shape[1]], ids[:, : top.indices.shape[1]] = top.values.to(dtype), top.indices
        if group is not None:
            values = gather_along(values, 1, group)
            ids = gather_along(ids + group.rank() * local.shape[1], 1, group)
        chosen = torch.topk(values, k, dim=1)
        return cls(logits=chosen.values, ids=ids.gather(1, chosen.indices))


Teacher = torch.Tensor | TopTokens
"""Logits [..., vocab] as the engine gives them, or the likeliest of each row."""


def divergences(student: torch.Tensor, teacher: Teacher, measure: Measure) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each token, and whether both models find the same token likeliest.

    Computed in float32 (float64 for float64 logits); differentiable once, in ``student`` alone.

    Args:
        student: logits [..., vocab], sharded by vocabulary or whole.
        teacher: likewise, also where only one of both is sharded; or some tokens of each row.
        measure: the divergence.

    Returns:
        Both [...], in the dtype of accumulation, equal on all ranks that share the vocabulary.
    """
    rows, columns, group = _rows(student), measure.columns(student), _group(student)
    if isinstance(teacher, TopTokens):
        parts = [teacher.logits, teacher.ids]
    else:  # in the shards of the student's
        if is_dtensor(teacher) and group is None:
            teacher = teacher.full_tensor()
        elif group is not None and not is_dtensor(teacher):
            width = rows.shape[1]
            teacher = teacher[..., group.rank() * width : (group.rank() + 1) * width]
        parts = [_rows(teacher)]
    results: tuple[torch.Tensor, torch.Tensor] = _Divergences.apply(  # type: ignore[no-untyped-call]
        rows, measure, columns, group, *parts
    )
    return results[0].view(student.shape[:-1]), results[1].view(student.shape[:-1])


def shared_like(teacher: torch.Tensor, rows: int) -> torch.Tensor:
    """Return logits [..., vocab] that ranks share as they would share those of ``rows`` tokens: [..., rows].

    Columns behind the vocabulary are 0. Other logits come back as they are. Collective where shards differ: some
    rows travel at a time, so that in addition to both shards only copies of those exist.
    """
    if not is_dtensor(teacher) or rows == teacher.shape[-1]:
        return teacher
    group, local = teacher.device_mesh.get_group(), _rows(teacher)
    rank, width = group.rank(), rows // group.size()
    theirs, shard = local.shape[1], local.new_zeros((len(local), width))
    here, there = slice(rank * theirs, (rank + 1) * theirs), slice(rank * width, (rank + 1) * width)
    going = [_common(here, slice(other * width, (other + 1) * width)) for other in range(group.size())]
    coming = [_common(slice(other * theirs, (other + 1) * theirs), there) for other in range(group.size())]
    for part in row_chunks(local, _COPIES):
        sent = [local[part, columns.start - here.start : columns.stop - here.start].flatten() for columns in going]
        count = len(local[part])
        sizes = [count * (columns.stop - columns.start) for columns in coming]
        arrived = all_to_all(torch.cat(sent), sizes, list(map(len, sent)), group)
        for columns, values in zip(coming, torch.split(arrived, sizes), strict=True):
            place = slice(columns.start - there.start, columns.stop - there.start)
            shard[part, place] = values.view(count, columns.stop - columns.start)
    return type(teacher).from_local(
        shard.view(*_local(teacher).shape[:-1], width), teacher.device_mesh, teacher.placements
    )


def _common(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


class _Divergences(torch.autograd.Function):
    """Divergences of rows of both models' logits, of which this rank may hold some columns."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        measure: Measure,
        columns: int,
        group: dist.ProcessGroup | None,
        *teacher: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = 0 if group is None else group.rank() * rows.shape[1]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        # Of each row the student's log-sum-exp, largest logit and its token, and the teacher's: [6, rows].
        extremes = rows.new_zeros((6, len(rows)), dtype=dtype)
        for part in row_chunks(rows, _COPIES):
            for place, values in zip((0, 3), _scaled(rows, teacher, part, measure, columns, first), strict=True):
                extremes[place, part] = torch.logsumexp(values, dim=1)
                extremes[place + 1, part] = _nothing(dtype)
                if columns:
                    largest, token = values.max(dim=1)
                    extremes[place + 1, part], extremes[place + 2, part] = largest, (token + first).to(dtype)
        of_ranks = gather_along(extremes[None], 0, group)  # [ranks, 6, rows]
        sums = torch.logsumexp(of_ranks[:, [0, 3]], dim=0)  # of whole rows, of the student and the teacher
        likeliest = [of_ranks[:, at + 1].gather(0, of_ranks[:, at].argmax(0)[None]).squeeze(0) for at in (1, 4)]
        same = (likeliest[0] == likeliest[1]).to(sums)
        # The divergences of the teacher's and of the student's distribution from the mixture, or from each other.
        terms, (of_teacher, of_student) = torch.zeros_like(sums), measure.shares
        for part in row_chunks(rows, _COPIES):
            student, taught = _scaled(rows, teacher, part, measure, columns, first)
            student, taught = student.sub_(sums[0, part, None]), taught.sub_(sums[1, part, None])
            middle = measure.between(student, taught)
            if of_teacher:
                log_ratio = taught - (student if middle is None else middle)
                terms[0, part] = log_ratio.mul_(taught.exp()).sum(1)
            if of_student:
                log_ratio = student - (taught if middle is None else middle)
                terms[1, part] = log_ratio.mul_(student.exp_()).sum(1)
        terms = reduce_from_group(terms, group)
        ctx.settings = measure, columns, first
        ctx.save_for_backward(rows, sums, terms[1], *teacher)
        ctx.mark_non_differentiable(same)
        return of_teacher * terms[0] + of_student * terms[1], same

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, sums, of_student, *teacher = ctx.saved_tensors
        measure, columns, first = ctx.settings
        share = measure.shares[1]
        scale, gradient = grad * (share or 1) / measure.temperature, torch.zeros_like(rows)
        for part in row_chunks(rows, _COPIES):
            student, taught = _scaled(rows, teacher, part, measure, columns, first)
            student, taught = student.sub_(sums[0, part, None]), taught.sub_(sums[1, part, None])
            if share:
                middle = measure.between(student, taught)
                slope = (student - (taught if middle is None else middle)).sub_(of_student[part, None])
                slope.mul_(student.exp_())
            else:
                slope = student.exp_().sub_(taught.exp_())
            gradient[part, :columns] = slope.mul_(scale[part, None])
        return gradient, *(None,) * (3 + len(teacher))


def _scaled(
    rows: torch.Tensor, teacher: Sequence[torch.Tensor], part: slice, measure: Measure, columns: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of some rows of both models' logits over the temperature, in full precision."""
    by, dtype = measure.temperature, torch.promote_types(rows.dtype, torch.float32)
    student, logits = rows[part, :columns].to(dtype, copy=True).div_(by), teacher[0][part]
    if len(teacher) == 1:
        return student, logits[:, :columns].to(dtype, copy=True).div_(by)
    values, place = logits / by, teacher[1][part] - first
    here = (place >= 0) & (place < columns)
    # One more column takes what other ranks hold.
    whole = values.new_full((len(values), columns + 1), _nothing(values.dtype))
    return student, whole.scatter_(1, torch.where(here, place, columns), values)[:, :-1]


def _nothing(dtype: torch.dtype) -> float:
    """A logit of tokens without probability. An infinite one would give 0 × ∞."""
    return torch.finfo(dtype).min / 4


def _local(logits: torch.Tensor) -> torch.Tensor:
    return logits.to_local() if is_dtensor(logits) else logits


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[rows, this rank's columns]"""
    local = _local(logits)
    return local.reshape(-1, local.shape[-1])


def _group(logits: torch.Tensor) -> dist.ProcessGroup | None:
    return logits.device_mesh.get_group() if is_dtensor(logits) else None
