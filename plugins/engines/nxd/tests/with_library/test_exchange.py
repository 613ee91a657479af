"""Tokens reach distributed experts by the library's exchange as they do by the one that runs in its CPU mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nxdt_testing.ranks import RankPool, process_group
from torch import nn

EXPERTS, CAPACITY, HIDDEN = 4, 3, 5


class Scaling(nn.Module):
    """Two experts, each a factor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([2.0, 3.0]) + 10 * rank)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[experts here, rows, hidden] to the same shape."""
        return rows * self.factors.view(-1, 1, 1)


def exchanged(tensor: torch.Tensor, *, split_dimension: int, concat_dimension: int, **others: Any) -> torch.Tensor:
    """What ``xm.all_to_all`` computes, over gloo."""
    del others
    whole = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, tensor.contiguous())
    parts = [each.chunk(len(whole), split_dimension)[dist.get_rank()] for each in whole]
    return torch.cat(parts, concat_dimension)


def way(*, on_host: bool) -> list[torch.Tensor]:
    """Outputs and gradients by the exchange for the host, or by the library's."""
    from neuronx_distributed.parallel_layers import mappings
    from nxdt_plugin_nxd import layout

    layout.computes_on_host = lambda: on_host
    mappings.xm.all_to_all = exchanged
    rows = torch.arange(EXPERTS * CAPACITY * HIDDEN, dtype=torch.float32).add(100 * dist.get_rank())
    rows = rows.view(EXPERTS, CAPACITY, HIDDEN).requires_grad_()
    experts = Scaling(dist.get_rank())
    outputs = layout.ExpertDispatcher(sequence_parallel=False).run_padded(rows, experts)
    (outputs * torch.linspace(0, 1, outputs.numel()).view(outputs.shape)).sum().backward()
    return [outputs.detach(), rows.grad, experts.factors.grad]


def both_ways() -> list[list[torch.Tensor]]:
    """A function of a pool of ranks, whose processes end with it."""
    from neuronx_distributed.parallel_layers import parallel_state

    with process_group():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        found = [way(on_host=True), way(on_host=False)]
        parallel_state.destroy_model_parallel()
    return found


def test_both_exchanges_give_the_same_outputs_and_gradients() -> None:
    for rank, (ours, librarys) in enumerate(RankPool(2).run(both_ways)):
        for one, other in zip(ours, librarys, strict=True):
            assert torch.equal(one, other)
        factors = torch.tensor([2.0, 3.0, 12.0, 13.0]).view(-1, 1, 1)
        rows = torch.arange(EXPERTS * CAPACITY * HIDDEN, dtype=torch.float32).add(100 * rank)
        assert torch.equal(ours[0], rows.view(EXPERTS, CAPACITY, HIDDEN) * factors)
