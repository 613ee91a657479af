"""Tokens travel to the processes that hold their experts, and the outputs travel back: all-to-all over a group."""

from __future__ import annotations

from itertools import islice, pairwise

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import all_to_all, exchanged_rows, exchanged_while
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.host_values import host_values
from nxdt_core.models.moe.dispatch import LocalDispatcher, Placement, collect, spread
from nxdt_core.models.moe.experts import RowGroups
from nxdt_core.models.moe.router import Routing

__all__ = ["ExchangingDispatcher"]


class ExchangingDispatcher(LocalDispatcher):
    """Experts in consecutive equal parts over the ranks of a group.

    An expert sees the tokens of all ranks, and its gradient is their sum. All ranks of the group call it equally often,
    forward and backward. Without capacity the ranks may have any number of tokens; with it, equally many, since then
    every size follows from that number and no rank needs to ask.
    """

    def __init__(self, group: dist.ProcessGroup | None, chunks: int = 1) -> None:
        """``group``: the expert parallel ranks; None for one. ``chunks``: parts in which rows are sent, one of which
        travels while the experts compute another one; equal on all ranks."""
        super().__init__(chunks if group is not None else 1)
        self.group = group

    @property
    def rank(self) -> int:
        """Which of equal parts of the experts this process has."""
        return 0 if self.group is None else self.group.rank()

    def ordered(self, routing: Routing) -> tuple[Placement, torch.Tensor]:
        """Return the rows by chunk and then by expert, and how many of each there are [chunks, experts]. A chunk has an
        equal part of the assignments, in the order of their tokens."""
        if self.chunks == 1:
            return super().ordered(routing)
        experts, assigned = len(routing.counts), routing.experts.flatten()
        numbers = torch.arange(1, len(assigned) + 1, device=assigned.device)
        chunk_of = (numbers * self.chunks - 1).div(max(1, len(assigned)), rounding_mode="floor")  # as _bounds
        groups = chunk_of * experts + assigned
        placement = Placement.ordered(groups, routing.experts.shape[1])
        edges = torch.arange(self.chunks * experts + 1, device=assigned.device)
        starts = torch.searchsorted(groups.index_select(0, placement.assignment_of), edges)
        return placement, starts.diff().view(self.chunks, experts)

    def run_ordered(self, rows: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_ordered` over the ranks of the group. The host waits for the device once,
        to learn how much is coming."""
        if self.group is None:
            return super().run_ordered(rows, counts, experts)
        ranks = self.group.size()
        sent = counts.view(self.chunks, ranks, -1).transpose(0, 1)  # [ranks, chunks, experts of one rank]
        received = exchanged_rows(sent.contiguous(), self.group)
        outgoing, incoming, sizes = _sizes(sent, received, len(rows))
        narrow = rows.to(compute_dtype(rows))  # which the experts would do
        numbers = torch.arange(received.shape[2], device=rows.device).repeat(ranks)
        arrivals = [
            Placement.ordered(numbers.repeat_interleave(here.flatten(), output_size=sum(coming)))
            for here, coming in zip(received.unbind(1), incoming, strict=True)
        ]

        def compute(chunk: int, arrived: torch.Tensor) -> torch.Tensor:  # by rank of origin, then by expert
            groups = RowGroups(received[:, chunk].sum(0), None if sizes is None else sizes[chunk])
            return collect(experts(spread(arrived, arrivals[chunk]), groups), arrivals[chunk]).squeeze(1)

        if self.chunks == 1:
            arrived = all_to_all(narrow, incoming[0], outgoing[0], self.group)
            return all_to_all(compute(0, arrived), outgoing[0], incoming[0], self.group)
        bounds = _bounds(len(rows), self.chunks)
        parts = [narrow[start:end] for start, end in pairwise(bounds)]
        return torch.cat(exchanged_while(compute, parts, list(zip(outgoing, incoming, strict=True)), self.group))

    def run_padded(self, rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_padded` over the ranks of the group; the host waits for nothing. A chunk
        has an equal part of each expert's capacity."""
        if self.group is None:
            return super().run_padded(rows, experts)
        ranks, (count, capacity, hidden) = self.group.size(), rows.shape
        narrow = rows.to(compute_dtype(rows))
        sizes = [end - start for start, end in pairwise(_bounds(capacity, self.chunks))]
        splits = [[count // ranks * size] * ranks for size in sizes]

        def compute(chunk: int, arrived: torch.Tensor) -> torch.Tensor:
            by_expert = arrived.view(ranks, -1, sizes[chunk], hidden).transpose(0, 1)
            outputs = experts(by_expert.flatten(1, 2)).view(by_expert.shape)  # [experts here, ranks, size, hidden]
            returned: torch.Tensor = outputs.transpose(0, 1).flatten(0, 2)
            return returned

        if self.chunks == 1:
            (equal,) = splits
            arrived = all_to_all(narrow.flatten(0, 1), equal, equal, self.group, equal=True)
            return all_to_all(compute(0, arrived), equal, equal, self.group, equal=True).view(rows.shape)
        parts = [part.flatten(0, 1) for part in torch.split(narrow, sizes, 1)]
        outputs = exchanged_while(compute, parts, [(equal, equal) for equal in splits], self.group)
        pairs = zip(outputs, sizes, strict=True)
        return torch.cat([output.view(count, size, hidden) for output, size in pairs], 1)


def _bounds(rows: int, chunks: int) -> list[int]:
    """Where each chunk begins, and the end of the last one."""
    return [rows * chunk // chunks for chunk in range(chunks + 1)]


_PerChunk = list[list[int]]


def _sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[_PerChunk, _PerChunk, _PerChunk | None]:
    """Rows that go to each rank, that come from each, and of each expert here, on the host, for each chunk; ``sent``
    and ``received`` [ranks, chunks, experts]. A graph reads the last ones only where it needs them: None.

    On the meta device, where a run is planned, the sizes are unknown: ``rows`` are then shared out equally.
    """
    ranks, chunks, experts = sent.shape
    if sent.is_meta:
        edges = _bounds(rows, chunks)
        equal = [
            [end - start for start, end in pairwise(_bounds(last - first, ranks))] for first, last in pairwise(edges)
        ]
        return equal, equal, None
    asked = [sent.sum(2).t(), received.sum(2).t()]
    if not torch.compiler.is_compiling():
        asked.append(received.sum(0))
    values = iter(host_values(torch.cat([each.flatten() for each in asked])))

    def take(count: int) -> _PerChunk:
        return [list(islice(values, count)) for _ in range(chunks)]

    return take(ranks), take(ranks), take(experts) if len(asked) == 3 else None
