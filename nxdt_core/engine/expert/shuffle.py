"""Tokens of several data parallel ranks mixed before their experts, and sorted out behind them.

Experts of bounded capacity drop what a micro-batch has too many of. One with very similar documents has too many for
few experts; mixed with those of other ranks it asks for as much as they do on the average.

Every n-th token goes to each of n ranks and keeps its place, to within n. No random numbers: recomputation and resumed
runs repeat it without any state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import all_to_all
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["TokenShuffle", "apply_token_shuffle", "dealt"]


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
        return (dealt(args[0], self.group), *args[1:]) if module.training else args

    def sort_out(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """After forward: ``output`` is [batch, seq, hidden]."""
        return dealt(output, self.group) if module.training else output


def dealt(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens that this rank is dealt, of ``hidden`` [batch, seq, hidden] on each of n ranks; the same shape.

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
