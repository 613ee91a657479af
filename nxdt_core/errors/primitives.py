"""Errors of loops over NxD Core's API (:mod:`nxdt_core.primitives`): codes ``NXDT-T05…`` and ``T06…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "ArgumentMeansNothing",
    "BatchDoesNotDivide",
    "CallDoesNotBind",
    "CheckpointTagMissing",
    "ConfigNotMade",
    "LayersNotFound",
    "LossNotFound",
    "ModelFnReturnsNoModule",
    "ModulesDifferBetweenRanks",
    "NotOfThisModel",
    "OutputNotTensors",
    "PipelineNeedsRunTrain",
    "RankFileUnreadable",
    "RankFilesDoNotFit",
    "StageModuleMisplaced",
    "WorldDoesNotDivide",
]


class ArgumentMeansNothing(NxdtError):
    """An argument of NxD Core that has another meaning there than anything that this engine does."""

    code = "NXDT-T050"
    happened = "{call}: {argument}={value} {reason}."
    remedy = "{advice}"
    usual_remedy = "Leave the argument out, or give the value that the message names."
    call: str
    argument: str
    value: str
    reason: str
    advice: str


class ModelFnReturnsNoModule(NxdtError):
    """The caller's function for the model gave something else."""

    code = "NXDT-T051"
    happened = "initialize_parallel_model: model_fn returned {found}, which is not a torch.nn.Module."
    remedy = "Return the module from model_fn; positional and keyword arguments behind model_fn are passed to it."
    found: str


class ModulesDifferBetweenRanks(NxdtError):
    """Ranks have built different models."""

    code = "NXDT-T052"
    happened = "model_fn built a model on rank {rank} that differs from that of rank 0: {difference}."
    remedy = (
        "Build the whole model equally on each rank: layers are sharded afterwards. model_fn starts with the random-"
        "number generator of rank 0; do not seed it with the rank."
    )
    rank: int
    difference: str


class LayersNotFound(NxdtError):
    """A pipeline, or recomputation of layers, has no list of layers to work on."""

    code = "NXDT-T053"
    happened = "{wanted} needs the list of the model's layers, and {found}."
    remedy = (
        "Keep the layers in one torch.nn.ModuleList (or ModuleDict with the keys '0', '1', ...), and name their class: "
        "pipeline_config={{'transformer_layer_cls': YourLayer}}."
    )
    wanted: str
    found: str


class StageModuleMisplaced(NxdtError):
    """A module whose place in the pipeline is not what its order of registration says."""

    code = "NXDT-T054"
    happened = "'{path}' {reason}, so that it cannot be assigned to a pipeline stage."
    remedy = (
        "Register what runs before the layers before their ModuleList and what runs after them behind it, each as a "
        "module that has its own parameters."
    )
    path: str
    reason: str


class PipelineNeedsRunTrain(NxdtError):
    """A forward pass of a model of which this rank has one stage."""

    code = "NXDT-T055"
    happened = "The model has {stages} pipeline stages, and this rank cannot run forward alone."
    remedy = "Call model.run_train(...) for forward and backward, and model.run_eval(...) for the loss alone."
    stages: int


class LossNotFound(NxdtError):
    """What the model returned has no loss where one is looked for."""

    code = "NXDT-T056"
    happened = "The model returned {found}, in which no loss was found."
    remedy = (
        "Return a scalar loss, a tuple that begins with it, or an object with the attribute or key 'loss'; or say where"
        " it is: pipeline_config={{'output_loss_value_spec': (True, False)}}."
    )
    found: str


class BatchDoesNotDivide(NxdtError):
    """Rows that do not fall into equal micro-batches."""

    code = "NXDT-T057"
    happened = "A batch of {rows} rows does not divide into num_microbatches={micro_batches}."
    remedy = "Give run_train a multiple of {micro_batches} rows, or change pipeline_config['num_microbatches']."
    rows: int
    micro_batches: int


class NotOfThisModel(NxdtError):
    """Parameters of another model than the one that was initialised."""

    code = "NXDT-T058"
    happened = "{call}: {problem} of the model that initialize_parallel_model returned."
    remedy = "Pass model.parameters(), or groups of them, of the model of the same nxd_config."
    call: str
    problem: str


class CheckpointTagMissing(NxdtError):
    """There is no checkpoint of that tag."""

    code = "NXDT-T059"
    happened = "{path} has no complete checkpoint {which}; its tags are {known}."
    remedy = "Name one of these tags, leave tag out for the newest, or save with save_checkpoint first."
    path: str
    tag: str | None
    tags: list[str]

    def _view(self) -> dict[str, Any]:
        which = "at all" if self.tag is None else f"with the tag {self.tag!r}"
        return {**super()._view(), "which": which, "known": listing(self.tags, 12) or "none"}


class OutputNotTensors(NxdtError):
    """A loop of the caller's own got something from the model in which tensors cannot be found."""

    code = "NXDT-T060"
    happened = "The model returned a {found}, whose tensors cannot be found to average gradients over {ranks} ranks."
    remedy = "Return tensors, or a tuple, a list, a dict or a dataclass of them; or use model.run_train(...)."
    found: str
    ranks: int


class WorldDoesNotDivide(NxdtError):
    """Processes that do not fall into groups of the sizes that were asked for."""

    code = "NXDT-T061"
    happened = (
        "{world} processes were started, which do not divide into groups of tensor_parallel_size={tp} x "
        "pipeline_parallel_size={pp}."
    )
    remedy = "Start a multiple of {group} processes, for example: torchrun --nproc-per-node {group} SCRIPT"
    world: int
    tp: int
    pp: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "group": self.tp * self.pp}


class CallDoesNotBind(NxdtError):
    """A call with arguments that the function does not have, or without some that it needs."""

    code = "NXDT-T063"
    happened = "{call}: {problem}."
    remedy = "Its arguments are {known}."
    usual_remedy = "Take the arguments that the message lists; the page on NxD Core has them all."
    call: str
    problem: str
    arguments: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "known": ", ".join(self.arguments) or "none"}


class ConfigNotMade(NxdtError):
    """A call that needs the process groups before they exist."""

    code = "NXDT-T064"
    happened = "{call} needs the layout, and neuronx_distributed_config was not called in this process."
    remedy = "Call neuronx_distributed_config(...) first."
    call: str


class RankFilesDoNotFit(NxdtError):
    """Files of ``parallel_layers.save`` that are not there, or not of this layout."""

    code = "NXDT-T065"
    happened = "{path} {problem}."
    remedy = "{advice}"
    usual_remedy = "Name the directory that was saved in the same layout, and the key that it was saved under."
    path: str
    problem: str
    advice: str


class RankFileUnreadable(NxdtError):
    """A file of a rank that is damaged, or that names what could run code."""

    code = "NXDT-T066"
    happened = "{path} cannot be read: {reason}."
    remedy = "Take another copy of the file, or save tensors, numbers and text alone."
    path: str
    reason: str
