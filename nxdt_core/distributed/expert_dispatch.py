"""Tokens travel to the processes that hold their experts, and the outputs travel back: all-to-all over a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import all_to_all, exchanged_rows
from nxdt_core.nn.autocast import compute_dtype
from nxdt_core.nn.moe.dispatch import LocalDispatcher, Placement, collect, spread

__all__ = ["ExchangingDispatcher"]


class ExchangingDispatcher(LocalDispatcher):
    """Experts in consecutive equal parts over the ranks of a group.

    An expert sees the tokens of all ranks, and its gradient is their sum. All ranks of the group call it equally often,
    forward and backward. Without capacity the ranks may have any number of tokens; with it, equally many, since then
    every size follows from that number and no rank needs to ask.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group``: the expert parallel ranks; None for one."""
        super().__init__()
        self.group = group

    def run_ordered(self, rows: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_ordered` over the ranks of the group. The host waits for the device once,
        to learn how much is coming."""
        if self.group is None:
            return super().run_ordered(rows, counts, experts)
        sent = counts.view(self.group.size(), -1)  # [ranks, experts of one rank]
        received = exchanged_rows(sent, self.group)
        outgoing, incoming = _splits(sent, received, len(rows))
        narrow = rows.to(compute_dtype(rows))  # which the experts would do
        arrived = all_to_all(narrow, incoming, outgoing, self.group)  # by rank of origin, then by expert
        numbers = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        placement = Placement.ordered(numbers.repeat_interleave(received.flatten(), output_size=sum(incoming)))
        outputs = experts(spread(arrived, placement), received.sum(0))
        return all_to_all(collect(outputs, placement).squeeze(1), outgoing, incoming, self.group)

    def run_padded(self, rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.run_padded` over the ranks of the group; the host waits for nothing."""
        if self.group is None:
            return super().run_padded(rows, experts)
        ranks = self.group.size()
        capacity, hidden = rows.shape[1:]
        splits = [len(rows) // ranks * capacity] * ranks
        narrow = rows.flatten(0, 1).to(compute_dtype(rows))
        arrived = all_to_all(narrow, splits, splits, self.group, equal=True)
        by_expert = arrived.view(ranks, -1, capacity, hidden).transpose(0, 1)  # [experts here, ranks, capacity, hidden]
        outputs = experts(by_expert.flatten(1, 2)).view(by_expert.shape)
        returned = all_to_all(outputs.transpose(0, 1).flatten(0, 2), splits, splits, self.group, equal=True)
        return returned.view(rows.shape)


def _splits(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows that go to each rank and that come from each, on the host; ``sent`` and ``received`` [ranks, experts].

    On the meta device, where a run is planned, the sizes are unknown: ``rows`` are then shared out equally.
    """
    if sent.is_meta:
        ranks = len(sent)
        equal = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
        return equal, equal
    outgoing, incoming = torch.stack((sent.sum(1), received.sum(1))).tolist()
    return outgoing, incoming
