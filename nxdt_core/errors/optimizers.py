"""Errors of optimizers, parameter groups and precisions: codes ``NXDT-T02…`` and ``NXDT-T03…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "GradientSumsRounded",
    "HiddenObjectiveState",
    "HiddenOptimizerState",
    "ImpureSchedule",
    "NoMasterWeights",
    "OptimizerNeedsWholeParameters",
    "OptimizerStateOfShards",
    "ParameterGroupEmpty",
]


class ParameterGroupEmpty(NxdtError):
    """A pattern of ``model.optim.param_groups`` that chooses nothing."""

    code = "NXDT-T020"
    happened = "model.optim.param_groups: {what} no trained parameter: {patterns}."
    remedy = (
        "Write paths as the checkpoint has them, as layers.*.mlp.router.weight; a leading * stands for any depth, any "
        "other for one component, and the last entry that matches a parameter counts. It has, among others, {some}."
    )
    patterns: list[str]
    names: list[str]
    """Of the trained parameters."""

    def _view(self) -> dict[str, Any]:
        what = "this pattern chooses" if len(self.patterns) == 1 else "these patterns choose"
        return super()._view() | {"what": what, "patterns": listing(self.patterns), "some": listing(self.names, 4)}


class OptimizerNeedsWholeParameters(NxdtError):
    """An update that would take a shard of a parameter for the whole."""

    code = "NXDT-T021"
    happened = (
        "torch.optim.{optimizer} computes with whole parameters, and this layout cuts {count} of them over ranks: "
        "{cut}."
    )
    remedy = (
        "Take adafactor or muon of nxdt, which compute over ranks, or an optimizer that works element by element; or "
        "keep parameters whole: distributed_strategy.zero1=false, and no tensor or expert parallelism."
    )
    optimizer: str
    parameters: list[str]

    def _view(self) -> dict[str, Any]:
        return super()._view() | {"count": len(self.parameters), "cut": listing(self.parameters, 3)}


class OptimizerStateOfShards(NxdtError):
    """Optimizer state that has neither the shape of its parameter nor the same values in each layout."""

    code = "NXDT-T025"
    happened = "Optimizer state {problem}: {named}."
    remedy = (
        "Keep state of the parameter's shape, or state that all its ranks compute equally (shards_of in "
        "nxdt_core.protocols.optimizer); or keep parameters whole: distributed_strategy.zero1=false, and no tensor or "
        "expert parallelism."
    )
    state: list[str]
    """``<parameter name>/<state name>``."""
    problem: str

    def _view(self) -> dict[str, Any]:
        return super()._view() | {"named": listing(self.state, 3)}


class HiddenOptimizerState(NxdtError):
    """An optimizer with attributes that change from step to step and are in no checkpoint; a warning."""

    code = "NXDT-T022"
    happened = (
        "Optimizer '{name}' ({dist}) changes {changed} at each step. No checkpoint keeps this, so that a "
        "resumed run may differ from an uninterrupted one."
    )
    remedy = (
        "Keep it as tensors or numbers in optimizer.state[parameter], which checkpoints save, or compute it from the "
        "state; a mere cache needs nothing."
    )
    name: str
    dist: str
    attributes: list[str]

    def _view(self) -> dict[str, Any]:
        return super()._view() | {"changed": listing(self.attributes, 4)}


class ImpureSchedule(NxdtError):
    """A learning-rate schedule that gives one step two values; a warning."""

    code = "NXDT-T023"
    happened = (
        "Learning-rate schedule '{name}' ({dist}) gives step {step} the factor {first!r}, and {second!r} when it is "
        "asked again. A resumed run then differs from an uninterrupted one."
    )
    remedy = "Compute the factor from the step alone: no counter, clock or random number."
    name: str
    dist: str
    step: int
    first: float
    second: float


class HiddenObjectiveState(NxdtError):
    """An objective with attributes that change from step to step; a warning."""

    code = "NXDT-T024"
    happened = (
        "Objective '{name}' ({dist}) changes {changed} at each step. No checkpoint keeps this, so that a "
        "resumed run may differ from an uninterrupted one."
    )
    remedy = "Compute the loss from the logits and the batch alone; a mere cache needs nothing."
    name: str
    dist: str
    attributes: list[str]

    def _view(self) -> dict[str, Any]:
        return super()._view() | {"changed": listing(self.attributes, 4)}


class GradientSumsRounded(NxdtError):
    """Sums of gradients that a layout would keep in less than a precision says."""

    code = "NXDT-T031"
    happened = (
        "The precision {precision} sums up gradients in {sums} and keeps weights in {weights} alone; ZeRO-{stage} adds "
        "up the {micro_batches} micro-batches of a step in the dtype of the weights that it shards."
    )
    remedy = (
        "Set distributed_strategy.zero_stage to 1, keep float32 weights (precision.master_weights: true under manual), "
        "or let data.micro_batch_size make one micro-batch of a step."
    )
    precision: str
    sums: str
    weights: str
    stage: int
    micro_batches: int


class NoMasterWeights(NxdtError):
    """Master weights are to be saved where a precision keeps none."""

    code = "NXDT-T030"
    happened = (
        "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt wants float32 as the model's weights, and "
        "the precision {precision} keeps them in {dtype} alone."
    )
    remedy = "Set it to false, or choose a precision.type with float32 weights, such as mixed_precision."
    precision: str
    dtype: str
