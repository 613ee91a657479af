"""Errors of optimizers, parameter groups and precisions: codes ``NXDT-T02…`` and ``NXDT-T03…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError, listing

ParameterGroupEmpty = NxdtError.define(
    "NXDT-T020",
    "A pattern of ``model.optim.param_groups`` that chooses nothing.",
    "model.optim.param_groups: {what} no trained parameter: {patterns:list}.",
    "Write paths as the checkpoint has them, as layers.*.mlp.router.weight; a leading * stands for any depth, any "
    "other for one component, and the last entry that matches a parameter counts. It has, among others, {names:list4}.",
    also=lambda error: {"what": "this pattern chooses" if len(error.patterns) == 1 else "these patterns choose"},
)

TrainableEmpty = NxdtError.define(
    "NXDT-T026",
    "A pattern of ``model.trainable`` that matches no parameter, or none at all.",
    "model.trainable: {what}.",
    "Write paths of parameters or modules as the checkpoint has them; a leading * stands for any depth, any other for "
    "one component. Nearest are {nearest:list4}.",
    also=lambda error: {"what": f"{listing(error.patterns)} matches no parameter" if error.patterns else "it is empty"},
)

OptimizerNeedsWholeParameters = NxdtError.define(
    "NXDT-T021",
    "An update that would take a shard of a parameter for the whole.",
    "torch.optim.{optimizer} computes with whole parameters, and this layout cuts {count} of them over ranks: "
    "{parameters:list3}.",
    "Take adafactor or muon of nxdt, which compute over ranks, or an optimizer that works element by element; or "
    "keep parameters whole: distributed_strategy.zero1=false, and no tensor or expert parallelism.",
    also=lambda error: {"count": len(error.parameters)},
)

OptimizerStateOfShards = NxdtError.define(
    "NXDT-T025",
    "Optimizer state that has neither the shape of its parameter nor the same values in each layout.",
    "Optimizer state {problem}: {state:list3}.",
    "Keep state of the parameter's shape, or state that all its ranks compute equally (shards_of in "
    "nxdt_core.protocols.optimizer); or keep parameters whole: distributed_strategy.zero1=false, and no tensor or "
    "expert parallelism.",
)

HiddenOptimizerState = NxdtError.define(
    "NXDT-T022",
    "An optimizer with attributes that change from step to step and are in no checkpoint; a warning.",
    "Optimizer '{name}' ({dist}) changes {attributes:list4} at each step. No checkpoint keeps this, so that a "
    "resumed run may differ from an uninterrupted one.",
    "Keep it as tensors or numbers in optimizer.state[parameter], which checkpoints save, or compute it from the "
    "state; a mere cache needs nothing.",
)

ImpureSchedule = NxdtError.define(
    "NXDT-T023",
    "A learning-rate schedule that gives one step two values; a warning.",
    "Learning-rate schedule '{name}' ({dist}) gives step {step} the factor {first!r}, and {second!r} when it is "
    "asked again. A resumed run then differs from an uninterrupted one.",
    "Compute the factor from the step alone: no counter, clock or random number.",
)

HiddenObjectiveState = NxdtError.define(
    "NXDT-T024",
    "An objective with attributes that change from step to step; a warning.",
    "Objective '{name}' ({dist}) changes {attributes:list4} at each step. No checkpoint keeps this, so that a "
    "resumed run may differ from an uninterrupted one.",
    "Compute the loss from the logits and the batch alone. Name in step_results what callbacks alone read.",
)

GradientSumsRounded = NxdtError.define(
    "NXDT-T031",
    "Sums of gradients that a layout would keep in less than a precision says.",
    "The precision {precision} sums up gradients in {sums} and keeps weights in {weights} alone; ZeRO-{stage} adds "
    "up the {micro_batches} micro-batches of a step in the dtype of the weights that it shards.",
    "Set distributed_strategy.zero_stage to 1, keep float32 weights (precision.master_weights: true under manual), "
    "or let data.micro_batch_size make one micro-batch of a step.",
)

NoMasterWeights = NxdtError.define(
    "NXDT-T030",
    "Master weights are to be saved where a precision keeps none.",
    "checkpoint.use_master_weights_in_ckpt wants float32 as the model's weights, and "
    "the precision {precision} keeps them in {dtype} alone.",
    "Set it to false, or choose a precision.type with float32 weights, such as mixed_precision.",
)
