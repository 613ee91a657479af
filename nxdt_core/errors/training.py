"""Errors of training runs, optimizers, run directories and reference models: codes ``NXDT-T…`` and ``NXDT-A03…``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from nxdt_core.errors.base import NxdtError, listing

ScheduleHasNoEnd = NxdtError.define(
    "NXDT-T001",
    "A decaying learning-rate schedule without a last step.",
    "model.optim.sched: {schedule} decays to an end, and neither it nor the trainer has one.",
    "Set model.optim.sched.max_steps or trainer.max_steps to a positive number.",
)

OptimizerStateDoesNotFit = NxdtError.define(
    "NXDT-T002",
    "Saved optimizer state of parameters that the model does not train.",
    "The checkpoint has optimizer state of {count} parameters that this run does not train ({parameters:list4}).",
    "Resume with the model and adapter of the checkpoint, or load its weights only: checkpoint.weight_init_only=true.",
    also=lambda error: {"count": len(error.parameters)},
)

OptimizerStateNotTensor = NxdtError.define(
    "NXDT-T003",
    "An optimizer keeps state that no checkpoint can hold.",
    "The optimizer keeps {state!r} of {parameter!r} as a {found}, which a checkpoint cannot hold.",
    "Keep state per parameter as tensors, ints, floats or bools.",
)

OptimizerChanged = NxdtError.define(
    "NXDT-T017",
    "A resume with an optimizer that cannot continue with the saved state.",
    "model.optim is {found}, and {where} has the state of {saved}.",
    "Resume with the optimizer of the checkpoint, or let this one begin without state: "
    "checkpoint.optimizer_on_change=reset.",
)

NoTrainingData = NxdtError.define(
    "NXDT-T004",
    "A dataloader without a training split.",
    "The dataloader {loader} has no training data.",
    "Name the training files in the section data, and give them a share where it has shares; `nxdt config show` "
    "prints what it holds now.",
)

RunAlreadyHasCheckpoints = NxdtError.define(
    "NXDT-T005",
    "A new run would write into an older one's checkpoints.",
    "{uri} already holds checkpoints, up to step {step}.",
    "Resume with checkpoint.resume_if_exists=true, or give the new run another name=….",
)

NoCheckpointToResume = NxdtError.define(
    "NXDT-T006",
    "The run must resume, and there is no checkpoint to resume from.",
    "There is no good checkpoint at {uri} to resume from.",
    "Check the path with `nxdt checkpoint list`, or start at step 0 with checkpoint.resume_ignore_no_checkpoint=true.",
    example={"uri": "nxdt_experiments/my_run/checkpoints"},
)

CannotWriteRunDirectory = NxdtError.define(
    "NXDT-T007",
    "The run's directory cannot be made or written.",
    "The run's directory {path} cannot be written: {reason}.",
    "Free space there, make it writable, or choose another directory with exp_manager.exp_dir=…. Checkpoints that "
    "are committed are intact; checkpoint.resume_if_exists=true continues from the newest.",
)

CannotGenerate = NxdtError.define(
    "NXDT-T008",
    "A checkpoint that text cannot be drawn from.",
    "This checkpoint cannot generate: {reason}.",
    "Give a prompt, and a checkpoint of a run whose section data.tokenizer names a tokenizer.",
)

AdapterBaseUnknown = NxdtError.define(
    "NXDT-T046",
    "An adapter whose base is not on this machine, or is another adapter.",
    "{where} is an adapter, and the weights below it are not found: it names {named}.",
    "Name them with --base, or in the adapter's base_model_name_or_path: a Hugging Face directory, or a checkpoint.",
    defaults={"adapter": False},
    also=lambda error: {
        "named": "no base"
        if error.base is None
        else f"{error.base[:200]!r}{', which is an adapter itself' if error.adapter else ''}"
    },
)

GenerationsNeedTokenizer = NxdtError.define(
    "NXDT-T016",
    "Prompts without a tokenizer.",
    "The callback 'generations' has prompts, and the configuration names no tokenizer.",
    "Set data.tokenizer.library, or take the callback out of trainer.callbacks.",
)

ShareOfUnknownLength = NxdtError.define(
    "NXDT-T009",
    "A share of a dataset that is a stream.",
    "{key} is the share {share}, and the dataset does not know how many samples it has.",
    "Give a number of batches, or null for all.",
)


class StepNotFinite(NxdtError):
    """A loss or gradient that is infinite or not a number."""

    code = "NXDT-T010"
    happened = (
        "By step {step} the loss or the gradient was not finite {skipped} time(s); newest loss {loss}, gradient norm "
        "{grad_norm}. The weights are as they were before."
    )
    remedy = (
        "Lower model.optim.lr, warm up longer or look at the data of that step; trainer.nonfinite=skip leaves such "
        "steps out and continues."
    )
    step: int
    skipped: int
    loss: float
    grad_norm: float


def _not_our_callback(error: Any) -> dict[str, str]:
    bases = {base.__module__.partition(".")[0] for base in type(error.found).__mro__}
    of_lightning = bases & {"pytorch_lightning", "lightning"}
    advice = ""
    if of_lightning:
        moved = {}
        for old, new in _LIGHTNING_HOOKS.items():  # those that a class outside of Lightning defines
            owner = next((base for base in type(error.found).__mro__ if old in vars(base)), None)
            if owner and owner.__module__.partition(".")[0] not in ("pytorch_lightning", "lightning"):
                moved[old] = new
        named = ", ".join(f"{old} → {new}" for old, new in moved.items())
        advice = f"{named and f' ({named})'}, or use it in your Trainer with nxdt-plugin-lightning"
    kind = f"{type(error.found).__name__}{' of PyTorch Lightning' if of_lightning else ''}"
    return {"kind": kind, "advice": advice}


NotOurCallback = NxdtError.define(
    "NXDT-T044",
    "A component of the kind ``callback`` that builds something else.",
    "{name} built a {kind}, and nxdt train calls an nxdt_core.api.Callback.",
    "Let it return a subclass of nxdt_core.api.Callback{advice}.",
    also=_not_our_callback,
)

CallbackMethodUnknown = NxdtError.define(
    "NXDT-T045",
    "A callback with a method that looks like one of its moments, and is none.",
    "{name} has the method {method}, which no run calls.",
    "Name it {advice}, or without on_ at its beginning if the callback calls it itself.",
    also=lambda error: {
        "advice": _LIGHTNING_HOOKS.get(error.method, get_close_matches(error.method, error.known, 1, 0.0)[0])
    },
)


_LIGHTNING_HOOKS: Mapping[str, str] = {
    **dict.fromkeys(("setup", "on_fit_start", "on_train_start"), "on_fit_start"),
    **dict.fromkeys(("on_train_batch_end", "on_before_optimizer_step", "on_after_backward"), "on_step_end"),
    "on_validation_batch_end": "on_validation_batch_end",
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end"), "on_validation_end"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "on_train_epoch_end"), "on_fit_end"),
    **dict.fromkeys(("on_exception", "teardown", "finalize"), "close"),
    "log_metrics": "on_log",
}
"""Method of a callback or logger of Lightning, and the one of a callback of nxdt that is called at that moment."""


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

ReferenceLost = NxdtError.define(
    "NXDT-A030",
    "A resumed run lacks the reference values of its beginning.",
    "The run resumes, and {path} is missing or damaged: the log-probabilities of these data under the weights that "
    "it began with, which cannot be computed from those that it has now.",
    "Undo changes of the data, the tokenizer and their settings, each of which makes another file. Otherwise put "
    "the directory 'reference' of the run back where it was, or begin a new run.",
)

ReferenceNeedsLength = NxdtError.define(
    "NXDT-A031",
    "Log-probabilities to be kept of samples without numbers.",
    "The objective {objective!r} keeps the log-probabilities of every sample, and the data ({split}) are a stream.",
    "Train on data with a length, such as data.name: preference.",
)

ReferenceNeedsAdapter = NxdtError.define(
    "NXDT-A032",
    "A reference at every step, and no frozen base to be one.",
    "The objective {objective!r} asks for the reference at every step, and there is no frozen base to be one: "
    "{which} of the model itself change.",
    "Set objective.precompute_ref_log_probs to true, or train an adapter (adapter.name: lora).",
    also=lambda error: {"which": listing(error.trained, 3) if error.trained else "all weights"},
)

LengthUnknown = NxdtError.define(
    "NXDT-T011",
    "A setting that counts passes over data, or cuts them, and data without a length.",
    "{key} needs to know how many samples the training data have, and they are a stream.",
    "Count steps instead (trainer.max_steps, trainer.val_check_interval, checkpoint.every_n_train_steps), or train "
    "on data with a length.",
)

MetricNotLogged = NxdtError.define(
    "NXDT-T012",
    "Early stopping on a metric that the run does not have.",
    "Early stopping judges {metric!r}, which is not logged; logged metrics are {known:list12}.",
    "Set exp_manager.early_stopping_callback_params.monitor to one of them, or its strict to false.",
)

CannotCopyFile = NxdtError.define(
    "NXDT-T013",
    "A file of ``exp_manager.files_to_copy``.",
    "exp_manager.files_to_copy names {path}, which cannot be copied: {reason}.",
    "Name files that exist, of different names; relative ones start at the working directory.",
)

LoggerLibraryMissing = NxdtError.define(
    "NXDT-T014",
    "A logger whose library is not installed.",
    "The logger '{logger}' needs the package '{package}', which cannot be imported: {reason}.",
    "Run: pip install '{install}', or switch it off: exp_manager.create_{logger}_logger=false.",
)

LoggerCannotStart = NxdtError.define(
    "NXDT-T015",
    "A logger whose library is there, and refuses.",
    "The logger '{logger}' cannot start: {reason}.",
    "{advice}; or switch it off: exp_manager.create_{logger}_logger=false.",
    usual_remedy="Correct the logger's settings, or switch it off: exp_manager.create_‹logger›_logger=false.",
)

NothingToPlot = NxdtError.define(
    "NXDT-T085",
    "``nxdt plot`` of a directory without metrics, or without matplotlib.",
    "{run} cannot be plotted: {reason}.",
    "{advice}",
    usual_remedy="Name the directory of a run that has logged a step, and install nxdt-core[plot].",
    defaults={"advice": "Name the directory of a run that has logged a step; its last lines print it as 'run'."},
)


class NotARunDirectory(NxdtError):
    """A directory without the records of a run."""

    code = "NXDT-T080"
    happened = "{path} has neither metrics.jsonl nor config.yaml."
    remedy = "Name the directory of a run, such as nxdt_experiments/NAME; nxdt train prints it as 'run:'."
    path: str


CannotWriteReport = NxdtError.define(
    "NXDT-T081",
    "A report that cannot be written.",
    "The report {path} cannot be written: {reason}.",
    "Name another file with --output.",
)

CannotServeReport = NxdtError.define(
    "NXDT-T082",
    "A port that cannot be served.",
    "Port {port} of 127.0.0.1 cannot be served: {reason}.",
    "Name another one with --port; 0 takes a free one.",
)

PluginVersionChanged = NxdtError.define(
    "NXDT-T083",
    "A resume under another version of the plugin of the model or the optimizer, which the configuration refuses.",
    "{dist} has version {found}, and {saved} wrote {where}; plugins.on_resume is 'refuse'.",
    "Run: pip install {dist}=={saved}, or resume with plugins.on_resume=warn.",
)

MonitoringFileUnwritable = NxdtError.define(
    "NXDT-T086",
    "A file of ``exp_manager.monitoring`` that cannot be written as the run starts.",
    "{key}: {path} cannot be written: {reason}.",
    "Name a file in a directory that exists and can be written, or leave the key out.",
)

MonitoringPortUnusable = NxdtError.define(
    "NXDT-T087",
    "A port of ``exp_manager.monitoring`` that cannot be opened.",
    "Port {port} of {host} cannot be opened: {reason}.",
    "Set another exp_manager.monitoring.port (0 takes a free one) or exp_manager.monitoring.host.",
)
