"""Errors of migrating configurations, codes ``NXDT-C030`` and ``NXDT-C033``, and checkpoints: ``NXDT-S08…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

MigrationRefused = NxdtError.define(
    "NXDT-C030",
    "A file of another framework than the one it was said to be of, or of an unknown one.",
    "{source} is not a file of {wanted}: {reason}.",
    "{advice}",
    usual_remedy="Change the source file as the message says, or leave out what has no counterpart.",
)


NoDecoder = NxdtError.define(
    "NXDT-C033",
    "A file of a model that is not a decoder, and would be trained as one.",
    "{source} is of {model} ({found}), and models here are transformer decoders.",
    "Train it where it is from, or begin a decoder from one of 'nxdt recipes list'; the models here: {known}.",
    also=lambda error: {"found": " and ".join(error.keys), "known": listing(error.models) or "none is installed"},
)

NeuronxUnreadable = NxdtError.define(
    "NXDT-S080",
    "A directory that is none of NxD Training's, or one of a kind that is not read.",
    "'{path}' cannot be read as a checkpoint of NxD Training: {reason}.",
    "Name the directory of one checkpoint, which holds model/dp_rank_00_tp_rank_00_pp_rank_00.pt. What is not "
    "read here, NxD's own checkpoint_converter turns into a Hugging Face model, which can be imported.",
)

NeuronxUnfinished = NxdtError.define(
    "NXDT-S081",
    "A save that never came to its end, or a deletion that did not.",
    "The checkpoint '{path}' is unfinished: it has the marker 'checkpoint' but not 'done'.",
    "Take another checkpoint of that run; this one was being written or deleted when its job ended.",
)

NeuronxRanksMissing = NxdtError.define(
    "NXDT-S082",
    "Files of some ranks are not there.",
    "'{path}' has files of {tp} tensor-parallel by {pp} pipeline ranks, but lacks {files:list}.",
    "Copy the missing files next to the others.",
)

PickleRefused = NxdtError.define(
    "NXDT-S083",
    "A pickle that names something which is not allowed; nothing of it was executed.",
    "'{path}' was not read: its pickle names {names:list}, which could run code.",
    "Tensors, plain containers and the incumbent's own references are read, nothing else. If it is user_content.pt "
    "that is refused and you trust the rest, import a copy without it: only the step is taken from it.",
)

NeuronxReplicasDiffer = NxdtError.define(
    "NXDT-S084",
    "Ranks that should hold the same tensor do not.",
    "The copies of '{tensor}' on the ranks of '{path}' differ.",
    "Take another checkpoint of that run: either a file was exchanged, or training drifted apart between ranks, "
    "and then no single model is right.",
)

NeuronxMisfit = NxdtError.define(
    "NXDT-S085",
    "Shards that do not make up a tensor of this model.",
    "'{tensor}' of '{path}' cannot be merged: {reason}.",
    "See that the configuration (--config) describes the model that was saved, and that no rank's file is missing.",
)

NeuronxFileDamaged = NxdtError.define(
    "NXDT-S086",
    "A file that ``torch.save`` has not written so.",
    "'{path}' cannot be read: {reason}.",
    "Copy the file again from where it was saved, or take another checkpoint of that run.",
)

NeuronxStateUnread = NxdtError.define(
    "NXDT-S087",
    "An optimizer's state that is missing, incomplete, or of a form that cannot be merged.",
    "The optimizer's state of '{path}' cannot be imported: {reason}.",
    "Copy missing files next to the others. To import the weights of model/ alone, without the optimizer's state "
    "and its float32 master weights, add --weights-only.",
)

NeuronxStepUnknown = NxdtError.define(
    "NXDT-S088",
    "An optimizer's state without the number of steps that the run had done.",
    "'{path}' does not say how many steps were done: it has no user_content.pt, and its name has no 'step='.",
    "Copy user_content.pt next to model/, or name the directory as NxD Training does "
    "(run--step=100-consumed_samples=6400.ckpt). To import the weights alone, add --weights-only.",
)
