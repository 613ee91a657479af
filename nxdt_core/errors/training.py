"""Errors of training runs, their files and reference models: codes ``NXDT-T…`` and ``NXDT-A03…``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "CallbackMethodUnknown",
    "CannotCopyFile",
    "CannotGenerate",
    "CannotServeReport",
    "CannotWriteReport",
    "CannotWriteRunDirectory",
    "GenerationsNeedTokenizer",
    "LengthUnknown",
    "LoggerCannotStart",
    "LoggerLibraryMissing",
    "MetricNotLogged",
    "NoCheckpointToResume",
    "NoTrainingData",
    "NotARunDirectory",
    "NotOurCallback",
    "NothingToPlot",
    "OptimizerChanged",
    "OptimizerStateDoesNotFit",
    "OptimizerStateNotTensor",
    "PluginVersionChanged",
    "ReferenceLost",
    "ReferenceNeedsAdapter",
    "ReferenceNeedsLength",
    "RunAlreadyHasCheckpoints",
    "ScheduleHasNoEnd",
    "ShareOfUnknownLength",
    "StepNotFinite",
]


class ScheduleHasNoEnd(NxdtError):
    """A decaying learning-rate schedule without a last step."""

    code = "NXDT-T001"
    happened = "model.optim.sched: {schedule} decays to an end, and neither it nor the trainer has one."
    remedy = "Set model.optim.sched.max_steps or trainer.max_steps to a positive number."
    schedule: str


class OptimizerStateDoesNotFit(NxdtError):
    """Saved optimizer state of parameters that the model does not train."""

    code = "NXDT-T002"
    happened = "The checkpoint has optimizer state of {count} parameters that this run does not train ({names})."
    remedy = (
        "Resume with the model and adapter of the checkpoint, or load its weights only: model.weight_init_only=true."
    )
    parameters: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "count": len(self.parameters), "names": listing(self.parameters, 4)}


class OptimizerStateNotTensor(NxdtError):
    """An optimizer keeps state that no checkpoint can hold."""

    code = "NXDT-T003"
    happened = "The optimizer keeps {state!r} of {parameter!r} as a {found}, which a checkpoint cannot hold."
    remedy = "Keep state per parameter as tensors, ints, floats or bools."
    parameter: str
    state: str
    found: str


class OptimizerChanged(NxdtError):
    """A resume with an optimizer that cannot continue with the saved state."""

    code = "NXDT-T017"
    happened = "model.optim is {found}, and {where} has the state of {saved}."
    remedy = (
        "Resume with the optimizer of the checkpoint, or let this one begin without state: "
        "checkpoint.optimizer_on_change=reset."
    )
    where: str
    saved: str
    """Name of the optimizer, and those of its state."""
    found: str


class NoTrainingData(NxdtError):
    """A dataloader without a training split."""

    code = "NXDT-T004"
    happened = "The dataloader {loader} has no training data."
    remedy = (
        "Name the training files in the section data, and give them a share where it has shares; `nxdt config show` "
        "prints what it holds now."
    )
    loader: str


class RunAlreadyHasCheckpoints(NxdtError):
    """A new run would write into an older one's checkpoints."""

    code = "NXDT-T005"
    happened = "{uri} already holds checkpoints, up to step {step}."
    remedy = "Resume with exp_manager.resume_if_exists=true, or give the new run another name=…."
    uri: str
    step: int


class NoCheckpointToResume(NxdtError):
    """The run must resume, and there is no checkpoint to resume from."""

    code = "NXDT-T006"
    happened = "There is no good checkpoint at {uri} to resume from."
    remedy = (
        "Check the path with `nxdt checkpoint list`, or start at step 0 with "
        "exp_manager.resume_ignore_no_checkpoint=true."
    )
    uri: str


class CannotWriteRunDirectory(NxdtError):
    """The run's directory cannot be made or written."""

    code = "NXDT-T007"
    happened = "The run's directory {path} cannot be written: {reason}."
    remedy = (
        "Free space there, make it writable, or choose another directory with exp_manager.exp_dir=…. Checkpoints that "
        "are committed are intact; exp_manager.resume_if_exists=true continues from the newest."
    )
    path: str
    reason: str


class CannotGenerate(NxdtError):
    """A checkpoint that text cannot be drawn from."""

    code = "NXDT-T008"
    happened = "This checkpoint cannot generate: {reason}."
    remedy = "Give a prompt, and a checkpoint of a run whose section data.tokenizer names a tokenizer."
    reason: str


class GenerationsNeedTokenizer(NxdtError):
    """Prompts without a tokenizer."""

    code = "NXDT-T016"
    happened = "The callback 'generations' has prompts, and the configuration names no tokenizer."
    remedy = "Set data.tokenizer.library, or take the callback out of trainer.callbacks."


class ShareOfUnknownLength(NxdtError):
    """A share of a dataset that is a stream."""

    code = "NXDT-T009"
    happened = "{key} is the share {share}, and the dataset does not know how many samples it has."
    remedy = "Give a number of batches, or null for all."
    key: str
    share: float


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


class NotOurCallback(NxdtError):
    """A component of the kind ``callback`` that builds something else."""

    code = "NXDT-T044"
    happened = "{name} built a {kind}, and nxdt train calls an nxdt_core.api.Callback."
    remedy = "Let it return a subclass of nxdt_core.api.Callback{advice}."
    name: str
    found: object

    def _view(self) -> dict[str, Any]:
        bases = {base.__module__.partition(".")[0] for base in type(self.found).__mro__}
        of_lightning = bases & {"pytorch_lightning", "lightning"}
        advice = ""
        if of_lightning:
            moved = {old: new for old, new in _LIGHTNING_HOOKS.items() if _overrides(self.found, old)}
            named = ", ".join(f"{old} → {new}" for old, new in moved.items())
            advice = f"{named and f' ({named})'}, or use it in your Trainer with nxdt-plugin-lightning"
        kind = f"{type(self.found).__name__}{' of PyTorch Lightning' if of_lightning else ''}"
        return {**super()._view(), "kind": kind, "advice": advice}


class CallbackMethodUnknown(NxdtError):
    """A callback with a method that looks like one of its moments, and is none."""

    code = "NXDT-T045"
    happened = "{name} has the method {method}, which no run calls."
    remedy = "Name it {advice}, or without on_ at its beginning if the callback calls it itself."
    name: str
    method: str
    known: Sequence[str]

    def _view(self) -> dict[str, Any]:
        close = get_close_matches(self.method, self.known, 1, 0.0)
        return {**super()._view(), "advice": _LIGHTNING_HOOKS.get(self.method, close[0])}


_LIGHTNING_HOOKS = {
    **dict.fromkeys(("setup", "on_fit_start", "on_train_start"), "on_fit_start"),
    **dict.fromkeys(("on_train_batch_end", "on_before_optimizer_step", "on_after_backward"), "on_step_end"),
    "on_validation_batch_end": "on_validation_batch_end",
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end"), "on_validation_end"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "on_train_epoch_end"), "on_fit_end"),
    **dict.fromkeys(("on_exception", "teardown", "finalize"), "close"),
    "log_metrics": "on_log",
}
"""Method of a callback or logger of Lightning, and the one of a callback of nxdt that is called at that moment."""


def _overrides(thing: object, method: str) -> bool:
    """Whether a class outside of Lightning defines the method."""
    found = next((base for base in type(thing).__mro__ if method in vars(base)), None)
    return found is not None and found.__module__.partition(".")[0] not in ("pytorch_lightning", "lightning")


class ReferenceLost(NxdtError):
    """A resumed run lacks the reference values of its beginning."""

    code = "NXDT-A030"
    happened = (
        "The run resumes, and {path} is missing or damaged: the log-probabilities of these data under the weights that "
        "it began with, which cannot be computed from those that it has now."
    )
    remedy = (
        "Undo changes of the data, the tokenizer and their settings, each of which makes another file. Otherwise put "
        "the directory 'reference' of the run back where it was, or begin a new run."
    )
    path: str


class ReferenceNeedsLength(NxdtError):
    """Log-probabilities to be kept of samples without numbers."""

    code = "NXDT-A031"
    happened = (
        "The objective {objective!r} keeps the log-probabilities of every sample, and the data ({split}) are a stream."
    )
    remedy = "Train on data with a length, such as data.name: preference."
    objective: str
    split: str


class ReferenceNeedsAdapter(NxdtError):
    """A reference at every step, and no frozen base to be one."""

    code = "NXDT-A032"
    happened = (
        "The objective {objective!r} asks for the reference at every step, and there is no frozen base to be one: "
        "{which} of the model itself change."
    )
    remedy = "Set objective.precompute_ref_log_probs to true, or train an adapter (adapter.name: lora)."
    objective: str
    trained: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "which": listing(self.trained, 3) if self.trained else "all weights"}


class LengthUnknown(NxdtError):
    """A setting that counts passes over data, or cuts them, and data without a length."""

    code = "NXDT-T011"
    happened = "{key} needs to know how many samples the training data have, and they are a stream."
    remedy = (
        "Count steps instead (trainer.max_steps, trainer.val_check_interval, checkpoint.every_n_train_steps), or train "
        "on data with a length."
    )
    key: str


class MetricNotLogged(NxdtError):
    """Early stopping on a metric that the run does not have."""

    code = "NXDT-T012"
    happened = "Early stopping judges {metric!r}, which is not logged; logged metrics are {names}."
    remedy = "Set exp_manager.early_stopping_callback_params.monitor to one of them, or its strict to false."
    metric: str
    known: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known, 12) or "none"}


class CannotCopyFile(NxdtError):
    """A file of ``exp_manager.files_to_copy``."""

    code = "NXDT-T013"
    happened = "exp_manager.files_to_copy names {path}, which cannot be copied: {reason}."
    remedy = "Name files that exist, of different names; relative ones start at the working directory."
    path: str
    reason: str


class LoggerLibraryMissing(NxdtError):
    """A logger whose library is not installed."""

    code = "NXDT-T014"
    happened = "The logger '{logger}' needs the package '{package}', which cannot be imported: {reason}."
    remedy = "Run: pip install 'nxdt-core[{logger}]', or switch it off: exp_manager.create_{logger}_logger=false."
    logger: str
    package: str
    reason: str


class LoggerCannotStart(NxdtError):
    """A logger whose library is there, and refuses."""

    code = "NXDT-T015"
    happened = "The logger '{logger}' cannot start: {reason}."
    remedy = "{advice}; or switch it off: exp_manager.create_{logger}_logger=false."
    usual_remedy = "Correct the logger's settings, or switch it off: exp_manager.create_‹logger›_logger=false."
    logger: str
    reason: str
    advice: str


class NothingToPlot(NxdtError):
    """``nxdt plot`` of a directory without metrics, or without matplotlib."""

    code = "NXDT-T085"
    happened = "{run} cannot be plotted: {reason}."
    remedy = "{advice}"
    usual_remedy = "Name the directory of a run that has logged a step, and install nxdt-core[plot]."
    run: str
    reason: str
    advice: str = "Name the directory of a run that has logged a step; its last lines print it as 'run'."


class NotARunDirectory(NxdtError):
    """A directory without the records of a run."""

    code = "NXDT-T080"
    happened = "{path} has neither metrics.jsonl nor config.yaml."
    remedy = "Name the directory of a run, such as nxdt_experiments/NAME; nxdt train prints it as 'run:'."
    path: str


class CannotWriteReport(NxdtError):
    """A report that cannot be written."""

    code = "NXDT-T081"
    happened = "The report {path} cannot be written: {reason}."
    remedy = "Name another file with --output."
    path: str
    reason: str


class CannotServeReport(NxdtError):
    """A port that cannot be served."""

    code = "NXDT-T082"
    happened = "Port {port} of 127.0.0.1 cannot be served: {reason}."
    remedy = "Name another one with --port; 0 takes a free one."
    port: int
    reason: str


class PluginVersionChanged(NxdtError):
    """A resume under another version of the plugin of the model or the optimizer, which the configuration refuses."""

    code = "NXDT-T083"
    happened = "{dist} has version {found}, and {saved} wrote {where}; plugins.on_resume is 'refuse'."
    remedy = "Run: pip install {dist}=={saved}, or resume with plugins.on_resume=warn."
    where: str
    dist: str
    saved: str
    found: str


class MonitoringFileUnwritable(NxdtError):
    """A file of ``exp_manager.monitoring`` that cannot be written as the run starts."""

    code = "NXDT-T086"
    happened = "{key}: {path} cannot be written: {reason}."
    remedy = "Name a file in a directory that exists and can be written, or leave the key out."
    key: str
    path: str
    reason: str


class MonitoringPortUnusable(NxdtError):
    """A port of ``exp_manager.monitoring`` that cannot be opened."""

    code = "NXDT-T087"
    happened = "Port {port} of {host} cannot be opened: {reason}."
    remedy = "Set another exp_manager.monitoring.port (0 takes a free one) or exp_manager.monitoring.host."
    port: int
    host: str
    reason: str
