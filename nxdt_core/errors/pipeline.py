"""Errors of pipeline stages and their schedules: codes ``NXDT-P03…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "LayersDoNotDivide",
    "MicroBatchesDoNotFit",
    "PipelineCutsDoNotFit",
    "PipelinePlanMissing",
    "TiedParametersCutApart",
    "UnknownPipelineCut",
    "ZeroBubbleCannot",
]


class PipelinePlanMissing(NxdtError):
    """A model that does not say where it may be cut."""

    code = "NXDT-P030"
    happened = "The model's plan does not say where it may be cut, and {stages} pipeline stages are asked for."
    remedy = "Set distributed_strategy.pipeline_model_parallel_size=1, or give the model's plan a PipelinePlan."
    stages: int


class LayersDoNotDivide(NxdtError):
    """An even cut that leaves a remainder."""

    code = "NXDT-P031"
    happened = "{layers} layers do not divide into {stages} pipeline stages."
    remedy = (
        "Choose PP x VPP that divides {layers}, or name the {cuts} modules that end a stage in model.pipeline_cuts."
    )
    layers: int
    stages: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "cuts": self.stages - 1}


class UnknownPipelineCut(NxdtError):
    """A cut at a module that does not exist or ends no layer."""

    code = "NXDT-P032"
    happened = "model.pipeline_cuts names '{cut}', which is no layer of the model."
    remedy = "{meant}Layers are '{first}' to '{last}'; each name is the last layer of a stage."
    cut: str
    close: tuple[str, ...]
    first: str
    last: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "meant": f"Did you mean {listing(self.close)}? " if self.close else ""}


class PipelineCutsDoNotFit(NxdtError):
    """Cuts that are too many, too few, repeated or out of order."""

    code = "NXDT-P033"
    happened = "model.pipeline_cuts {given} cannot make {stages} pipeline stages."
    remedy = "Name {cuts} layers in ascending order, the last one of each stage but the final stage's."
    cuts_given: tuple[str, ...]
    stages: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "given": list(self.cuts_given), "cuts": self.stages - 1}


class MicroBatchesDoNotFit(NxdtError):
    """A pipeline schedule that the micro-batches of a step cannot fill."""

    code = "NXDT-P034"
    happened = (
        "The pipeline schedule {schedule} with PP {pp} wants {rule} micro-batches a step, and there are "
        "{micro_batches} (data.global_batch_size / (data.micro_batch_size x data parallel size))."
    )
    remedy = "Raise data.global_batch_size or lower data.micro_batch_size, e.g. to {example} micro-batches."
    schedule: str
    pp: int
    micro_batches: int
    rule: str
    example: int


class TiedParametersCutApart(NxdtError):
    """Tied parameters on stages between which gradients are not exchanged."""

    code = "NXDT-P035"
    happened = (
        "The tied parameters '{owner}' and '{user}' would lie on the pipeline stages {owner_stage} and {user_stage}."
    )
    remedy = "Choose model.pipeline_cuts that keep their layers together; only the first and the last stage share any."
    owner: str
    user: str
    owner_stage: int
    user_stage: int


class ZeroBubbleCannot(NxdtError):
    """What needs a whole backward pass, under a schedule that splits it."""

    code = "NXDT-P036"
    happened = "The pipeline schedule zbv splits backward into two passes, which does not go with {feature}."
    remedy = "Set distributed_strategy.pipeline_schedule=1f1b or interleaved, or {without}."
    feature: str
    without: str
