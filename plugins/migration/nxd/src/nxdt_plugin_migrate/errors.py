"""Errors of migrating configurations, codes ``NXDT-C030`` and ``NXDT-C033``, and checkpoints: ``NXDT-S08…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

__all__ = [
    "MigrationRefused",
    "NeuronxFileDamaged",
    "NeuronxMisfit",
    "NeuronxRanksMissing",
    "NeuronxReplicasDiffer",
    "NeuronxStateUnread",
    "NeuronxStepUnknown",
    "NeuronxUnfinished",
    "NeuronxUnreadable",
    "NoDecoder",
    "PickleRefused",
]


class MigrationRefused(NxdtError):
    """A file of another framework than the one it was said to be of, or of an unknown one."""

    code = "NXDT-C030"
    happened = "{source} is not a file of {wanted}: {reason}."
    remedy = "{advice}"
    usual_remedy = "Change the source file as the message says, or leave out what has no counterpart."
    source: str
    wanted: str
    reason: str
    advice: str


class NoDecoder(NxdtError):
    """A file of a model that is not a decoder, and would be trained as one."""

    code = "NXDT-C033"
    happened = "{source} is of {model} ({found}), and models here are transformer decoders."
    remedy = "Train it where it is from, or begin a decoder from one of 'nxdt recipes list'; the models here: {known}."
    source: str
    model: str
    keys: list[str]
    models: list[str]

    def _view(self) -> dict[str, Any]:
        found = " and ".join(self.keys)
        return {**super()._view(), "found": found, "known": listing(self.models) or "none is installed"}


class NeuronxUnreadable(NxdtError):
    """A directory that is none of NxD Training's, or one of a kind that is not read."""

    code = "NXDT-S080"
    happened = "'{path}' cannot be read as a checkpoint of NxD Training: {reason}."
    remedy = (
        "Name the directory of one checkpoint, which holds model/dp_rank_00_tp_rank_00_pp_rank_00.pt. What is not "
        "read here, NxD's own checkpoint_converter turns into a Hugging Face model, which can be imported."
    )
    path: str
    reason: str


class NeuronxUnfinished(NxdtError):
    """A save that never came to its end, or a deletion that did not."""

    code = "NXDT-S081"
    happened = "The checkpoint '{path}' is unfinished: it has the marker 'checkpoint' but not 'done'."
    remedy = "Take another checkpoint of that run; this one was being written or deleted when its job ended."
    path: str


class NeuronxRanksMissing(NxdtError):
    """Files of some ranks are not there."""

    code = "NXDT-S082"
    happened = "'{path}' has files of {tp} tensor-parallel by {pp} pipeline ranks, but lacks {listed}."
    remedy = "Copy the missing files next to the others."
    path: str
    tp: int
    pp: int
    files: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": listing(self.files)}


class PickleRefused(NxdtError):
    """A pickle that names something which is not allowed; nothing of it was executed."""

    code = "NXDT-S083"
    happened = "'{path}' was not read: its pickle names {listed}, which could run code."
    remedy = (
        "Tensors, plain containers and the incumbent's own references are read, nothing else. If it is user_content.pt "
        "that is refused and you trust the rest, import a copy without it: only the step is taken from it."
    )
    path: str
    names: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": listing(self.names)}


class NeuronxReplicasDiffer(NxdtError):
    """Ranks that should hold the same tensor do not."""

    code = "NXDT-S084"
    happened = "The copies of '{tensor}' on the ranks of '{path}' differ."
    remedy = (
        "Take another checkpoint of that run: either a file was exchanged, or training drifted apart between ranks, "
        "and then no single model is right."
    )
    tensor: str
    path: str


class NeuronxMisfit(NxdtError):
    """Shards that do not make up a tensor of this model."""

    code = "NXDT-S085"
    happened = "'{tensor}' of '{path}' cannot be merged: {reason}."
    remedy = (
        "See that the configuration (--config) describes the model that was saved, and that no rank's file is missing."
    )
    tensor: str
    path: str
    reason: str


class NeuronxFileDamaged(NxdtError):
    """A file that ``torch.save`` has not written so."""

    code = "NXDT-S086"
    happened = "'{path}' cannot be read: {reason}."
    remedy = "Copy the file again from where it was saved, or take another checkpoint of that run."
    path: str
    reason: str


class NeuronxStateUnread(NxdtError):
    """An optimizer's state that is missing, incomplete, or of a form that cannot be merged."""

    code = "NXDT-S087"
    happened = "The optimizer's state of '{path}' cannot be imported: {reason}."
    remedy = (
        "Copy missing files next to the others. To import the weights of model/ alone, without the optimizer's state "
        "and its float32 master weights, add --weights-only."
    )
    path: str
    reason: str


class NeuronxStepUnknown(NxdtError):
    """An optimizer's state without the number of steps that the run had done."""

    code = "NXDT-S088"
    happened = "'{path}' does not say how many steps were done: it has no user_content.pt, and its name has no 'step='."
    remedy = (
        "Copy user_content.pt next to model/, or name the directory as NxD Training does "
        "(run--step=100-consumed_samples=6400.ckpt). To import the weights alone, add --weights-only."
    )
    path: str
