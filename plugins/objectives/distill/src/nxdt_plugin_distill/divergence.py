"""Divergences between two models' distributions of each token, in every layout of the vocabulary and in bounded memory.

In addition to the logits of both models only the gradient of one is held whole: full-precision copies of some rows
exist at a time. Where ranks share the vocabulary, each row needs six numbers of each rank in forward, and two sums.
"""

from __future__ import annotations

import math
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
        own = local[:, : measure.columns(logits)]
        dtype = torch.promote_types(local.dtype, torch.float32)
        values = own.new_full((len(local), k), _nothing(dtype), dtype=dtype)
        ids = torch.zeros_like(values, dtype=torch.int64)
        found = torch.topk(own, min(k, own.shape[1]), dim=1)
        values[:, : found.values.shape[1]], ids[:, : found.indices.shape[1]] = found.values.to(dtype), found.indices
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
    rows, columns = _rows(student), measure.columns(student)
    parts = [teacher.logits, teacher.ids] if isinstance(teacher, TopTokens) else [_rows(_cut_like(student, teacher))]
    found: tuple[torch.Tensor, torch.Tensor] = _Divergences.apply(  # type: ignore[no-untyped-call]
        rows, measure, columns, _group(student), *parts
    )
    return found[0].view(student.shape[:-1]), found[1].view(student.shape[:-1])


def shared_like(teacher: torch.Tensor, rows: int) -> torch.Tensor:
    """Return logits [..., vocab] that ranks share as they would share those of ``rows`` tokens: [..., rows].

    Columns behind the vocabulary are 0. Other logits come back as they are. Collective where shards differ: some
    rows travel at a time, so that in addition to both shards only copies of those exist.
    """
    if not is_dtensor(teacher) or rows == teacher.shape[-1]:
        return teacher
    group, local = teacher.device_mesh.get_group(), _rows(teacher)
    rank, width = group.rank(), rows // group.size()
    theirs, found = local.shape[1], local.new_zeros((len(local), width))
    here, there = slice(rank * theirs, (rank + 1) * theirs), slice(rank * width, (rank + 1) * width)
    going = [_common(here, slice(each * width, (each + 1) * width)) for each in range(group.size())]
    coming = [_common(slice(each * theirs, (each + 1) * theirs), there) for each in range(group.size())]
    for part in row_chunks(local, _COPIES):
        sent = [local[part, each.start - here.start : each.stop - here.start].flatten() for each in going]
        count = len(local[part])
        sizes = [count * (each.stop - each.start) for each in coming]
        arrived = all_to_all(torch.cat(sent), sizes, [len(each) for each in sent], group)
        for each, values in zip(coming, torch.split(arrived, sizes), strict=True):
            found[part, each.start - there.start : each.stop - there.start] = values.view(count, each.stop - each.start)
    return type(teacher).from_local(
        found.view(*_local(teacher).shape[:-1], width), teacher.device_mesh, teacher.placements
    )


def _common(own: slice, other: slice) -> slice:
    start = max(own.start, other.start)
    return slice(start, max(start, min(own.stop, other.stop)))


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        measure: Measure,
        columns: int,
        group: dist.ProcessGroup | None,
        *teacher: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair = _Pair(rows, teacher, measure, columns, group)
        sums, same = _over_ranks(pair.extremes(), group)
        of_teacher, of_student = reduce_from_group(pair.terms(sums), group)
        ctx.pair = measure, columns, group
        ctx.save_for_backward(rows, sums, of_student, *teacher)
        ctx.mark_non_differentiable(same)
        first, second = measure.shares
        return first * of_teacher + second * of_student, same

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, sums, of_student, *teacher = ctx.saved_tensors
        gradient = _Pair(rows, teacher, *ctx.pair).gradient(sums, of_student, grad)
        return gradient, *(None,) * (3 + len(teacher))


class _Pair:
    """Rows of both models' logits, of which this rank may hold a part."""

    def __init__(
        self,
        rows: torch.Tensor,
        teacher: tuple[torch.Tensor, ...] | list[torch.Tensor],
        measure: Measure,
        columns: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rows, self._teacher, self._measure, self._columns = rows, teacher, measure, columns
        self._first = 0 if group is None else group.rank() * rows.shape[1]
        self._dtype = torch.promote_types(rows.dtype, torch.float32)

    def extremes(self) -> torch.Tensor:
        """Return of each row the student's log-sum-exp, largest logit and its token, and the teacher's: [6, rows]."""
        found = self._rows.new_zeros((6, len(self._rows)), dtype=self._dtype)
        for part in row_chunks(self._rows, _COPIES):
            for first, values in zip((0, 3), self._scaled(part), strict=True):
                found[first, part] = torch.logsumexp(values, dim=1)
                found[first + 1, part] = _nothing(self._dtype)
                if self._columns:
                    largest, place = values.max(dim=1)
                    found[first + 1, part], found[first + 2, part] = largest, (place + self._first).to(self._dtype)
        return found

    def terms(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the divergences of the teacher's and of the student's distribution from the mixture, or from each
        other, summed over this rank's columns: [2, rows]; 0 where the measure has none.

        Args:
            sums: log-sum-exp of the whole rows of the student and the teacher, [2, rows].
        """
        found, (first, second) = torch.zeros_like(sums), self._measure.shares
        for part in row_chunks(self._rows, _COPIES):
            student, teacher = self._log_probs(part, sums)
            middle = self._measure.between(student, teacher)
            if first:
                apart = teacher - (student if middle is None else middle)
                found[0, part] = apart.mul_(teacher.exp()).sum(1)
            if second:
                apart = student - (teacher if middle is None else middle)
                found[1, part] = apart.mul_(student.exp_()).sum(1)
        return found

    def gradient(self, sums: torch.Tensor, of_student: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the student's logits.

        Args:
            sums: as of :meth:`terms`.
            of_student: the second of :meth:`terms`, of whole rows.
            grad: of the rows' divergences.
        """
        second = self._measure.shares[1]
        scale = grad * (second or 1) / self._measure.temperature
        found = torch.zeros_like(self._rows)
        for part in row_chunks(self._rows, _COPIES):
            student, teacher = self._log_probs(part, sums)
            if second:
                middle = self._measure.between(student, teacher)
                own = (student - (teacher if middle is None else middle)).sub_(of_student[part, None])
                own.mul_(student.exp_())
            else:
                own = student.exp_().sub_(teacher.exp_())
            found[part, : self._columns] = own.mul_(scale[part, None])
        return found

    def _log_probs(self, part: slice, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        student, teacher = self._scaled(part)
        return student.sub_(sums[0, part, None]), teacher.sub_(sums[1, part, None])

    def _scaled(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of some rows of both models' logits over the temperature, in full precision."""
        by, given = self._measure.temperature, [each[part] for each in self._teacher]
        student = self._rows[part, : self._columns].to(self._dtype, copy=True).div_(by)
        if len(given) == 1:
            return student, given[0][:, : self._columns].to(self._dtype, copy=True).div_(by)
        values, place = given[0] / by, given[1] - self._first
        own = (place >= 0) & (place < self._columns)
        # One more column takes what other ranks hold.
        whole = values.new_full((len(values), self._columns + 1), _nothing(values.dtype))
        return student, whole.scatter_(1, torch.where(own, place, self._columns), values)[:, :-1]


def _over_ranks(own: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both models' log-sum-exp of whole rows, [2, rows], and where their likeliest token is the same.

    Args:
        own: :meth:`_Pair.extremes` of this rank's columns.
        group: the ranks that share the rows.
    """
    of_ranks = gather_along(own[None], 0, group)  # [ranks, 6, rows]
    sums = torch.logsumexp(of_ranks[:, [0, 3]], dim=0)
    student, teacher = (
        of_ranks[:, first + 1].gather(0, of_ranks[:, first].argmax(0)[None]).squeeze(0) for first in (1, 4)
    )
    return sums, (student == teacher).to(sums)


def _nothing(dtype: torch.dtype) -> float:
    """A logit of tokens without probability. An infinite one would give 0 × ∞."""
    return torch.finfo(dtype).min / 4


def _cut_like(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the teacher's logits in the parts of the student's. Collective where the teacher's alone are sharded."""
    if is_dtensor(teacher) == is_dtensor(student):
        return teacher
    if is_dtensor(teacher):
        return teacher.full_tensor()
    group, width = _group(student), _local(student).shape[-1]
    return teacher if group is None else teacher[..., group.rank() * width : (group.rank() + 1) * width]


def _local(logits: torch.Tensor) -> torch.Tensor:
    return logits.to_local() if is_dtensor(logits) else logits


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[rows, this rank's columns]"""
    local = _local(logits)
    return local.reshape(-1, local.shape[-1])


def _group(logits: torch.Tensor) -> dist.ProcessGroup | None:
    return logits.device_mesh.get_group() if is_dtensor(logits) else None
