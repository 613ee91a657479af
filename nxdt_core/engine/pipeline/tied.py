"""Tied parameters whose two copies are on the first and the last pipeline stage.

Both start from one draw (the owner's name) and get the same gradient, the sum of both, so that equal updates keep them
equal. On which rank a copy counts in norms and checkpoints is the business of who counts: the owner's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.protocols.plan import ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedCopies:
    """A pair of ``ParallelPlan.tied`` whose parameters are on different stages."""

    owner: str
    user: str
    parameters: tuple[nn.Parameter, ...]
    """The parameters of the two modules that are on this rank: none, one, or both (``zbv`` ends where it begins)."""


def tied_copies(stages: Mapping[int, nn.Module], plan: ParallelPlan, *, stage_count: int) -> list[TiedCopies]:
    """Return the separated pairs, the same list on every rank.

    Args:
        stages: this rank's modules by stage number, of :func:`~nxdt_core.engine.pipeline.split.cut_stage`, which
            refuses pairs across stages of any modules but those before and after the layers.
        plan: its ``tied`` pairs, and the modules before and after the layers.
        stage_count: stages in all.
    """
    if stage_count == 1 or plan.pipeline is None:
        return []
    ends = plan.pipeline.first, plan.pipeline.last
    maps = [dict(module.named_parameters(remove_duplicate=False)) for module in stages.values()]
    return [
        TiedCopies(
            owner=owner, user=user, parameters=tuple(of[name] for name in (owner, user) for of in maps if name in of)
        )
        for owner, user in plan.tied
        if {_end_of(owner, ends), _end_of(user, ends)} == {0, 1}
    ]


def tied_group(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """Return the group of the first and the last pipeline rank of this rank's column: same tensor, data and context
    shard.

    Its members alone call this (the others may). None on ranks between, and where one rank has both copies.
    """
    sizes = mesh.sizes
    if sizes.pp == 1 or sizes.schedule == "zbv" or mesh.rank("pp") not in (0, sizes.pp - 1):
        return None
    if sizes.pp == 2:
        return mesh.group("pp")
    column: list[int] = mesh.mesh("pp").mesh.tolist()
    group: dist.ProcessGroup = dist.new_group([column[0], column[-1]], use_local_synchronization=True)
    return group


def sum_tied_gradients(copies: Sequence[TiedCopies], group: dist.ProcessGroup | None) -> None:
    """Give both copies of each pair the sum of their gradients.

    After data parallel reduction and before the norm, on the local shards: both copies are sharded in the same way. A
    copy without a gradient counts as zero; frozen parameters are left alone.

    Args:
        copies: of :func:`tied_copies`.
        group: of :func:`tied_group`.
    """
    for pair in copies:
        gradients = [_local_gradient(parameter) for parameter in pair.parameters if parameter.requires_grad]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            dist.all_reduce(gradients[0], group=group)


def _end_of(parameter: str, ends: tuple[tuple[str, ...], tuple[str, ...]]) -> int | None:
    """Return 0 for the modules before the layers, 1 for those after, None within the layers."""
    for end, modules in enumerate(ends):
        if any(parameter.startswith(f"{name}.") for name in modules):
            return end
    return None


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of the gradient, to be changed in place."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    if not is_dtensor(grad):
        return grad
    assert is_dtensor(parameter)
    if grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad.to_local()
