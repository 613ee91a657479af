"""Pipeline stages: which layers each has, the module that is left of a model when the rest is taken out, and tied
parameters whose two copies are on the first and the last stage.

Both copies start from one draw (the owner's name) and get the same gradient, the sum of both, so that equal updates
keep them equal. Norms and checkpoints count the owner's copy alone.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.errors.layouts import (
    LayersDoNotDivide,
    PipelineCutsDoNotFit,
    PipelinePlanMissing,
    TiedParametersCutApart,
    UnknownPipelineCut,
)
from nxdt_core.protocols.plan import ParallelPlan

TiedCopies = tuple[nn.Parameter, ...]
"""The parameters of a pair of ``ParallelPlan.tied`` on different stages that are on this rank: none, one, or both
(``zbv`` ends where it begins)."""


def stage_layers(layers: Sequence[str], stages: int, cuts: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Divide layers over stages, in order.

    Args:
        layers: dotted names of all layers, such as ``layers.0``.
        stages: how many.
        cuts: names of the last layer of every stage but the final one; None cuts evenly.

    Raises:
        LayersDoNotDivide: an even cut is not possible.
        UnknownPipelineCut: a cut is none of ``layers``.
        PipelineCutsDoNotFit: not ``stages - 1`` of them, or not ascending.
    """
    if cuts is None:
        if len(layers) % stages:
            raise LayersDoNotDivide(layers=len(layers), stages=stages)
        size = len(layers) // stages
        ends = [size * (stage + 1) for stage in range(stages)]
    else:
        places = {name: place for place, name in enumerate(layers, start=1)}
        for cut in cuts:
            if cut not in places:
                close = tuple(difflib.get_close_matches(cut, layers, n=2))
                raise UnknownPipelineCut(cut=cut, close=close, first=layers[0], last=layers[-1])
        ends = [*(places[cut] for cut in cuts), len(layers)]
        if len(cuts) != stages - 1 or sorted(set(ends[:-1])) != ends[:-1]:
            raise PipelineCutsDoNotFit(cuts_given=tuple(cuts), stages=stages)
    return [tuple(layers[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def cut_stage(
    module: nn.Module, plan: ParallelPlan, *, stage: int, stages: int, cuts: Sequence[str] | None = None
) -> nn.Module:
    """Return a copy of ``module`` with the parts of one stage: names and layer numbers stay those of the whole model.

    Layers of other stages are gone, ``first`` and ``last`` modules of others are ``nn.Identity``; all else, such as a
    rotary table, stays on every stage. The first argument of its forward is hidden states where ``stage`` is not 0.

    Args:
        module: the whole model, on the meta device (the copy then costs no memory); it is not changed.
        plan: its ``pipeline`` names the layers and the modules around them.
        stage: number of the stage, from 0.
        stages: number of stages of the pipeline.
        cuts: as for :func:`stage_layers`.

    Raises:
        PipelinePlanMissing: the plan says nothing of pipelines.
        TiedParametersCutApart: parameters that are one would need to exchange gradients in mid-pipeline.
        LayersDoNotDivide, UnknownPipelineCut, PipelineCutsDoNotFit: as :func:`stage_layers`.
    """
    if stages == 1:
        return copy.deepcopy(module)
    if plan.pipeline is None:
        raise PipelinePlanMissing(stages=stages)
    layers = module.get_submodule(plan.pipeline.layers)
    if not isinstance(layers, nn.ModuleDict):
        raise TypeError(f"'{plan.pipeline.layers}' must be a ModuleDict whose keys are global layer numbers")
    of_stages = stage_layers([f"{plan.pipeline.layers}.{key}" for key, _ in layers.named_children()], stages, cuts)

    # Tied parameters are on one stage, or are in the modules before and after the layers.
    def stage_of(parameter: str) -> int:
        for number, names in enumerate(of_stages):
            if _within(parameter, names):
                return number
        return stages - 1 if _within(parameter, plan.pipeline.last) else 0  # type: ignore[union-attr]

    outer = (*plan.pipeline.first, *plan.pipeline.last)
    for owner, user in plan.tied:
        owner_stage, user_stage = stage_of(owner), stage_of(user)
        if owner_stage != user_stage and not (_within(owner, outer) and _within(user, outer)):
            raise TiedParametersCutApart(owner=owner, user=user, owner_stage=owner_stage, user_stage=user_stage)

    # The other layers are out while the rest is copied, so that a copy takes no time for them.
    everything, names = dict(layers.items()), {name.rpartition(".")[2] for name in of_stages[stage]}
    try:
        for name in everything.keys() - names:
            del layers[name]
        part = copy.deepcopy(module)
    finally:
        layers.clear()
        layers.update(everything)
    absent = [
        *(plan.pipeline.first if stage > 0 else ()),
        *(plan.pipeline.last if stage < stages - 1 else ()),
    ]
    for name in absent:
        part.set_submodule(name, nn.Identity(), strict=True)
    return part


def ties_ends(plan: ParallelPlan) -> bool:
    """Return whether ``plan`` ties nothing but modules before and after the layers, which any cuts may separate."""
    ends = () if plan.pipeline is None else (*plan.pipeline.first, *plan.pipeline.last)
    return all(_within(name, ends) for pair in plan.tied for name in pair)


def _within(parameter: str, modules: Sequence[str]) -> bool:
    return any(parameter.startswith(f"{name}.") for name in modules)


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
    first, last = plan.pipeline.first, plan.pipeline.last
    maps = [dict(module.named_parameters(remove_duplicate=False)) for module in stages.values()]
    return [
        tuple(of[name] for name in (owner, user) for of in maps if name in of)
        for owner, user in plan.tied
        if (_within(owner, first) and _within(user, last)) or (_within(owner, last) and _within(user, first))
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
        gradients = []  # this rank's parts, to be changed in place
        for parameter in pair:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if is_dtensor(grad):
                assert is_dtensor(parameter)
                if grad.placements != parameter.placements:
                    grad = parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)
                grad = grad.to_local()
            gradients.append(grad)
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            dist.all_reduce(gradients[0], group=group)
