"""Pipeline stages: which layers each has, and the module that is left of a model when the rest is taken out."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from nxdt_core.errors.layouts import (
    LayersDoNotDivide,
    PipelineCutsDoNotFit,
    PipelinePlanMissing,
    TiedParametersCutApart,
    UnknownPipelineCut,
)
from nxdt_core.protocols.mesh import stages_of_rank
from nxdt_core.protocols.plan import ParallelPlan, PipelinePlan

__all__ = ["cut_stage", "stage_layers", "stages_of_rank", "ties_ends"]


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
    names = [f"{plan.pipeline.layers}.{key}" for key, _ in _layers(module, plan.pipeline).named_children()]
    of_stages = stage_layers(names, stages, cuts)
    _check_tied(plan, plan.pipeline, of_stages)
    with _only(_layers(module, plan.pipeline), [name.rpartition(".")[2] for name in of_stages[stage]]):
        part = copy.deepcopy(module)
    absent = [
        *(plan.pipeline.first if stage > 0 else ()),
        *(plan.pipeline.last if stage < stages - 1 else ()),
    ]
    for name in absent:
        part.set_submodule(name, nn.Identity(), strict=True)
    return part


@contextmanager
def _only(layers: nn.ModuleDict, kept: Sequence[str]) -> Iterator[None]:
    """Keep only the layers ``kept`` within the block, so that a copy takes no time for the others."""
    everything = dict(layers.items())
    try:
        for name in everything.keys() - set(kept):
            del layers[name]
        yield
    finally:
        layers.clear()
        layers.update(everything)


def _layers(module: nn.Module, pipeline: PipelinePlan) -> nn.ModuleDict:
    layers = module.get_submodule(pipeline.layers)
    if not isinstance(layers, nn.ModuleDict):
        raise TypeError(f"'{pipeline.layers}' must be a ModuleDict whose keys are global layer numbers")
    return layers


def _check_tied(plan: ParallelPlan, pipeline: PipelinePlan, layers: Sequence[Sequence[str]]) -> None:
    """Check that tied parameters are on one stage, or are in the modules before and after the layers."""
    final = len(layers) - 1

    def stage_of(parameter: str) -> int:
        for stage, names in enumerate(layers):
            if _within(parameter, names):
                return stage
        return final if _within(parameter, pipeline.last) else 0

    for owner, user in plan.tied:
        places = stage_of(owner), stage_of(user)
        ends = all(_within(name, (*pipeline.first, *pipeline.last)) for name in (owner, user))
        if places[0] != places[1] and not ends:
            raise TiedParametersCutApart(owner=owner, user=user, owner_stage=places[0], user_stage=places[1])


def ties_ends(plan: ParallelPlan) -> bool:
    """Return whether ``plan`` ties nothing but modules before and after the layers, which any cuts may separate."""
    ends = () if plan.pipeline is None else (*plan.pipeline.first, *plan.pipeline.last)
    return all(_within(name, ends) for pair in plan.tied for name in pair)


def _within(parameter: str, modules: Sequence[str]) -> bool:
    return any(parameter.startswith(f"{name}.") for name in modules)
