"""Exchanges of tokens before and behind experts: with the ranks that hold the experts, and between data parallel ranks.

Experts are divided over the ranks of ``ep``, each perhaps a part over those of ``tp``. Tensor parallel ranks route the
same tokens. Each may send them whole to its peers of ``ep``, or a slice of their features: the peers then put the
slices together. Slices send less over ``ep`` and more over ``tp``, which pays where the ranks of ``ep`` are on several
machines.

Token shuffling mixes the tokens of several data parallel ranks before their experts, and sorts them out behind them.
Experts of bounded capacity drop what a micro-batch has too many of. One with very similar documents has too many for
few experts; mixed with those of other ranks it asks for as much as they do on the average. Every n-th token goes to
each of n ranks and keeps its place, to within n. No random numbers: recomputation and resumed runs repeat it without
any state.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import all_to_all, gather_along, gather_whole, scatter_sum_along
from nxdt_core.engine.expert_dispatch import ExchangingDispatcher
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.gathered_again import gathers_ahead
from nxdt_core.engine.tensor.layers import sum_over_ranks
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.moe.experts import RowGroups
from nxdt_core.models.moe.router import Routing
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["AllToAllDispatcher", "Sliced", "apply_token_shuffle", "exchange_tokens"]

Sliced = Literal["none", "capacity", "all"]
"""Which rows are sent in slices; ``capacity``: those of experts with a capacity. Torch 2.13 cannot compile the backward
of others, whose number depends on data and which are gathered."""


class AllToAllDispatcher(ExchangingDispatcher):
    """Experts in consecutive equal parts over the ranks of a group, each perhaps a part over tensor parallel ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        sliced: Sliced = "none",
        chunks: int = 1,
    ) -> None:
        """``group``: over ``ep``; ``tensor_group``: over ``tp``, whose ranks hold parts of each expert. None for one
        rank. ``sequence_parallel``: hand on this rank's part of the sequence only. ``sliced``: which rows are sent in
        slices. ``chunks``: as of :class:`~nxdt_core.engine.expert_dispatch.ExchangingDispatcher`."""
        super().__init__(group, chunks)
        self.tensor_group = tensor_group
        self.sequence_parallel = sequence_parallel
        self.sliced = sliced

    def forward(self, hidden: torch.Tensor, routing: Routing, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.forward`, over the ranks of both groups."""
        tensor_group = self.tensor_group
        sliced = self.sliced == "all" or (self.sliced == "capacity" and routing.capacity is not None)
        if not sliced or tensor_group is None or hidden.shape[-1] % tensor_group.size():
            return super().forward(hidden, routing, experts)
        width = hidden.shape[-1] // tensor_group.size()

        def of_slices(rows: torch.Tensor, *groups: RowGroups) -> torch.Tensor:
            partial = experts(gather_along(rows, -1, tensor_group), *groups)
            return scatter_sum_along(partial, -1, tensor_group)

        own = hidden.narrow(-1, tensor_group.rank() * width, width)
        mixed = self.mixed(own.flatten(0, 1), routing, cast(nn.Module, of_slices)).view_as(own)
        narrow = mixed.to(compute_dtype(mixed))
        whole = _by_sequence(narrow, tensor_group) if self.sequence_parallel else gather_whole(narrow, -1, tensor_group)
        return whole.to(mixed.dtype)

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the tensor parallel ranks computed, whole or this rank's part of the sequence."""
        if self.tensor_group is None:
            return mixed
        narrow = mixed.to(compute_dtype(mixed))  # as the product of a matrix that the ranks share
        gathers_ahead(self, narrow)
        return sum_over_ranks(narrow, self.tensor_group, sequence_parallel=self.sequence_parallel).to(mixed.dtype)


def _by_sequence(slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sequence with all features [batch, seq / n, n * width], of its slice of the features
    of the whole sequence [batch, seq, width]."""
    ranks, (batch, seq, width) = group.size(), slices.shape
    parts = slices.view(batch, ranks, -1, width).transpose(0, 1)  # [ranks, batch, seq / ranks, width]
    splits = [batch * seq // ranks] * ranks
    arrived = all_to_all(parts.flatten(0, 2), splits, splits, group, equal=True)
    return arrived.view(ranks, batch, -1, width).permute(1, 2, 0, 3).flatten(2)


def apply_token_shuffle(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, ranks: int) -> None:
    """Let each mixture of experts see the tokens of ``ranks`` neighbouring data parallel ranks mixed, while it trains.

    Collective: every rank of every pipeline stage calls it. Call it after tensor parallelism, whose block entries
    must see the tokens that were mixed already: under sequence parallelism each rank exchanges its part alone.

    Args:
        module: one pipeline stage, changed in place.
        plan: the mixtures are the tensor blocks around its expert dispatchers.
        mesh: of the run; ``ranks`` divides its ``dp_shard``.
        ranks: 1 changes nothing.
    """
    if ranks == 1:
        return
    mesh.split_dp(ranks)
    group = mesh.group("token_shuffle")
    assert group is not None
    shuffle = TokenShuffle(group)
    dispatchers = [path for path, _ in module.named_modules() if matches_any(plan.experts.dispatchers, path)]
    for path, part in module.named_modules():
        if matches_any(plan.tensor_blocks, path) and any(inner.startswith(f"{path}.") for inner in dispatchers):
            part.register_forward_pre_hook(shuffle.mix, prepend=True)
            part.register_forward_hook(shuffle.sort_out)


class TokenShuffle:
    """Hooks around a mixture of experts; they do nothing in evaluation, where ranks may differ in their tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def mix(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Before forward: ``args[0]`` is [batch, seq, hidden]."""
        return (exchange_tokens(args[0], self.group), *args[1:]) if module.training else args

    def sort_out(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """After forward: ``output`` is [batch, seq, hidden]."""
        return exchange_tokens(output, self.group) if module.training else output


def exchange_tokens(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens that this rank gets, of ``hidden`` [batch, seq, hidden] on each of n ranks; the same shape.

    Token ``n · i + j`` of rank r becomes token ``n · i + r`` of rank j. Dealing twice undoes it.

    Raises:
        ValueError: the ranks do not divide the tokens.
    """
    ranks = group.size()
    count, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    if count % ranks:
        raise ValueError(f"{count} tokens do not divide over the {ranks} ranks that exchange them")
    by_rank = hidden.reshape(-1, ranks, width).transpose(0, 1)
    splits = [count // ranks] * ranks
    arrived = all_to_all(by_rank.flatten(0, 1), splits, splits, group, equal=True)
    return arrived.view(ranks, -1, width).transpose(0, 1).reshape(hidden.shape)
