"""Errors of checkpoints: writing, reading, trusting, and exchanging them with other formats: codes ``NXDT-S…``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, listing, unusable


class StorageError(NxdtError):
    """Base of the errors of checkpoint storage; a storage backend raises it, or a subclass, for what a user can fix."""

    code = "NXDT-S000"
    happened = "The checkpoint store failed at {where}: {reason}."
    remedy = "Check that the store can be reached and written, then run the same command again."
    where: str
    reason: str


class StorageFull(StorageError):
    """No space is left, or a quota is used up."""

    code = "NXDT-S001"
    happened = "No space is left for {where}: {reason}."
    remedy = (
        "Checkpoints committed before are intact. Free space, keep fewer checkpoints (checkpoint.keep_last) or name "
        "another place (checkpoint.uri); the same command then resumes from the newest checkpoint."
    )


class StorageDenied(StorageError):
    """The store may not be read or written."""

    code = "NXDT-S002"
    happened = "Access to {where} is denied: {reason}."
    remedy = "Give this user the right to read and write there, or set checkpoint.uri to a place that is writable."


StoragePathIsFile = StorageError.define(
    "NXDT-S003",
    "A part of the path that must be a directory is something else.",
    "{where} cannot hold checkpoints: {reason}.",
    "Name a directory (checkpoint.uri), which need not exist, or move what is in the way.",
)

BadStorageKey = StorageError.define(
    "NXDT-S004",
    "A key that no store accepts.",
    "{where!r} is not a key of a store: {reason}.",
    "Write keys as relative paths such as 'step-00000100/manifest.json'.",
)

BadStorageUri = StorageError.define(
    "NXDT-S005",
    "An address of a store that means nothing.",
    "{where!r} is not an address for checkpoints: {reason}.",
    "Write a path ('runs/a/checkpoints'), 'file:///absolute/path' or 'scheme://…' of an installed store.",
)


class CheckpointDamaged(StorageError):
    """A file of a committed checkpoint is not what was written."""

    code = "NXDT-S010"
    happened = "The checkpoint file {where} is damaged: {reason}."
    remedy = (
        "Resume from another step ('nxdt checkpoint list' shows them), or restore the file from a copy; "
        "'nxdt checkpoint verify --deep' lists all that is damaged."
    )


CheckpointIsNoFile = CheckpointDamaged.define(
    "NXDT-S019",
    "A symbolic link, a pipe or a device is in the place of a file or directory of a checkpoint.",
    "nxdt does not open {where}: {reason}.",
    "Below a checkpoint directory nxdt follows no symbolic links and opens regular files only; the directory "
    "itself may be a link. Copy the files to this place, or name the place that a link leads to.",
)

NoBestCheckpoint = NxdtError.define(
    "NXDT-S023",
    "An address ends in ``best``, and no checkpoint there is ranked by a metric.",
    "No checkpoint at {where} is the best one: checkpoint.monitor is {monitor!r}, and none has such a metric.",
    "Name a step ('nxdt checkpoint list' shows them). For the next run, set checkpoint.monitor to a logged metric such "
    "as val_loss.",
)

LockIsNoFile = CheckpointDamaged.define(
    "NXDT-S020",
    "A link, a pipe, a directory, or a file with two names is in the place of a lock.",
    "nxdt does not lock {where}: {reason}.",
    "No checkpoint needs this name. Make sure that no run uses this place, delete what has the name, and run the "
    "same command again: nxdt makes a new file.",
)


class CheckpointNotFound(StorageError):
    """No committed checkpoint where one was asked for."""

    code = "NXDT-S011"
    happened = "There is no checkpoint at {where}: {reason}."
    remedy = "'nxdt checkpoint list' shows what an address holds; name its root or one of its step directories."
    example: ClassVar[Mapping[str, Any]] = {"where": "nxdt_experiments/my_run", "reason": "it does not exist"}


class CheckpointTooNew(StorageError):
    """A checkpoint of a format that this version does not read."""

    code = "NXDT-S012"
    happened = "{where} cannot be read by this version of nxdt-core: {reason}."
    remedy = "pip install --upgrade nxdt-core."


UnsavableState = StorageError.define(
    "NXDT-S013",
    "A value that a checkpoint cannot hold: neither JSON nor a plain tensor.",
    "The state under {where!r} cannot be saved: {reason}.",
    "Keep None, bool, int, float, str, lists, tuples, dicts and plain tensors in states: a checkpoint holds JSON "
    "and raw tensors only, so that loading one can run no code.",
)

CheckpointConflict = StorageError.define(
    "NXDT-S014",
    "Two writers saved the same step at once.",
    "{where} was committed by another process meanwhile: {reason}.",
    "Make sure that no second job writes to this checkpoint.uri, then run the same command again.",
)

TensorNotInCheckpoint = StorageError.define(
    "NXDT-S015",
    "A tensor that was asked for is not in the checkpoint.",
    "The checkpoint {where} lacks what was asked for: {reason}.",
    "Load it into the model and optimizer that it was saved from, or ask for the names that it has.",
)

TensorStateUnsupported = StorageError.define(
    "NXDT-S016",
    "A tensor that is not dense, plain and of a known dtype.",
    "The state under {where!r} cannot be saved: {reason}.",
    "Save dense tensors of a floating-point, integer or boolean dtype that hold data.",
)

CheckpointRankFailed = StorageError.define(
    "NXDT-S017",
    "Another rank failed with a bug while all ranks saved or loaded; that rank prints its traceback.",
    "Rank {rank} failed at {where}: {reason}.",
    "See the traceback of that rank; checkpoints committed before are intact.",
)

CheckpointFilesMissing = StorageError.define(
    "NXDT-S018",
    "The ranks do not write to one and the same store, or it has lost what they wrote.",
    "The checkpoint {where} was not committed: {reason}.",
    "Set checkpoint.uri to a place that all nodes share, such as a network file system or an object store. Where "
    "they do share it, it has cut off or lost files without an error: check its health and its quota.",
)

AdapterOfAnotherBase = NxdtError.define(
    "NXDT-S091",
    "An adapter was trained over other frozen weights than those that are there.",
    "The adapter at '{where}' was trained over other base weights than those of {base}.",
    "Name the base that it was trained over, with its step: checkpoint.resume_from with "
    "checkpoint.weight_init_only=true in a run, --base for generate, evaluate and merge-lora; without one, the "
    "run's own seed and model are its base.",
)

BaseDtypeChanged = NxdtError.define(
    "NXDT-S092",
    "A run resumes an adapter over base weights in another ``adapter.base_dtype``.",
    "The adapter at '{where}' was trained with adapter.base_dtype={saved}, and it is {found} here.",
    "Set adapter.base_dtype={saved}, or begin a new run: checkpoint.resume_from with checkpoint.weight_init_only=true.",
)

CheckpointHasNoAverage = NxdtError.define(
    "NXDT-S090",
    "Averaged weights are asked of a checkpoint without them.",
    "{where} holds no average of the weights.",
    "Export the weights themselves, without --ema; exp_manager.ema.enable=true lets a run keep an average.",
)

CopyHasOtherCheckpoint = StorageError.define(
    "NXDT-S060",
    "The step is committed at the destination of a copy, by another save.",
    "{where} holds another checkpoint of that step: {reason}.",
    "Copy to another address, or delete that step there first. Nothing was changed.",
)

CopyOntoOtherStep = StorageError.define(
    "NXDT-S061",
    "The destination of a copy names a step that is not the copied one.",
    "{where} is no place for that copy: {reason}.",
    "Name the root of the destination; a checkpoint keeps its step, which is part of its manifest.",
)

NoSoundCheckpoint = StorageError.define(
    "NXDT-S062",
    "None of the checkpoints that pruning would keep verifies.",
    "Nothing was deleted at {where}: {reason}.",
    "'nxdt checkpoint verify --deep' names the damaged files; restore them from a copy, then prune again.",
)


class StoreInUse(StorageError):
    """Another run saves to the store, or writes to the run's directory."""

    code = "NXDT-S040"
    happened = "{where} belongs to {owner}: {reason}."
    remedy = (
        "Two runs in one place would delete each other's checkpoints and overwrite each other's files. Give this run "
        "its own place (name, or checkpoint.uri), or stop the other run, then run the same command again."
    )
    owner: str


OwnershipLost = StorageError.define(
    "NXDT-S041",
    "This run no longer owns the store that it saves to.",
    "{where} no longer belongs to this run, and nothing more was committed there: {reason}.",
    "What was committed before is intact. Stop the run that should not be there; the same command then resumes "
    "from the newest checkpoint.",
)

SameWeightsSaved = StorageError.define(
    "NXDT-S050",
    "What was to be committed holds the weights of an older checkpoint, though the run has changed them since.",
    "The save {where} was not committed: {reason}.",
    "Something saved old copies of the weights, or nothing trains them: look at grad_norm, and try "
    "checkpoint.async_save=false. Where updates are meant to be so small that rounding undoes them, set "
    "checkpoint.refuse_same_weights=false.",
)

SaveTookTooLong = StorageError.define(
    "NXDT-S051",
    "A store or a rank that hangs, or a store too slow for the deadline.",
    "The save {where} was not done in time: {reason}.",
    "Checkpoints committed before are intact. Make sure that the store answers on every node, then run the same "
    "command again; checkpoint.deadline_s allows more time.",
)

SaveLacksElements = StorageError.define(
    "NXDT-S022",
    "What the ranks wrote is not the whole model.",
    "The checkpoint {where} was not committed: {reason}.",
    "This is a defect of the parallel engine: its state_dict has to give each parameter once, with the shape of "
    "the whole. Save with parallel_engine.name=torch, and report it to the authors of the engine.",
)

SigningLibraryMissing = StorageError.define(
    "NXDT-S130",
    "Signatures need a library that the core does not require.",
    "The signature of {where} needs the library cryptography: {reason}.",
    "pip install 'nxdt-core[sign]'.",
)

SigningKeyUnusable = StorageError.define(
    "NXDT-S131",
    "A file of a key that cannot be read, or that holds something other than the Ed25519 key that is needed.",
    "{where} is not a usable {kind} key: {reason}.",
    "Use Ed25519 keys in PEM without a passphrase: 'openssl genpkey -algorithm ed25519 -out sign.pem' makes a "
    "private key (checkpoint.sign.key), 'openssl pkey -in sign.pem -pubout -out sign.pub.pem' writes its public "
    "key (checkpoint.sign.trusted, --trusted).",
)

SigningKeyNotTrusted = StorageError.define(
    "NXDT-S132",
    "A run would refuse the checkpoints that it saves itself.",
    "checkpoint.sign.key ({where}, {reason}) is not one of the keys of checkpoint.sign.trusted.",
    "Add its public key to checkpoint.sign.trusted, so that this run can resume from its own checkpoints.",
)


class CheckpointNotTrusted(StorageError):
    """Base of the errors of checkpoints that lack a valid signature of a trusted key."""

    code = "NXDT-S133"
    happened = "{where} is refused: {reason}."
    remedy = (
        "Take a checkpoint that one of the trusted keys has signed. To accept this one, remove checkpoint.sign.trusted "
        "(or --trusted). A run signs what it saves where checkpoint.sign.key names a private key."
    )


CheckpointNotSigned = CheckpointNotTrusted.define(
    "NXDT-S134",
    "A checkpoint without a signature, where one is required.",
    "{where} is not signed, and a signature of a trusted key is required: {reason}.",
    CheckpointNotTrusted.remedy,
)

CheckpointSignedByOther = CheckpointNotTrusted.define(
    "NXDT-S135",
    "A checkpoint with the signature of a key that is not trusted.",
    "{where} is refused: {reason}. Trusted: {trusted:list}.",
    "Take a checkpoint that one of the trusted keys has signed. Where that key is to be trusted, get its public "
    "key from its owner, not from this place, and add the file to checkpoint.sign.trusted (or --trusted).",
)


class CheckpointSignatureWrong(CheckpointNotTrusted):
    """A signature that was not made of this manifest by the key that it names."""

    code = "NXDT-S136"
    happened = "{where} is refused: {reason}."
    remedy = "The manifest or its signature was changed after the save. Restore both from a copy that verifies."


CheckpointDigestsWeak = CheckpointNotTrusted.define(
    "NXDT-S137",
    "A signed manifest whose digests are so weak that anyone can construct other bytes for them.",
    "{where} is refused although it is signed: {reason}.",
    CheckpointNotTrusted.remedy,
)

ForeignSourceIsAddress = NxdtError.define(
    "NXDT-S077",
    "An address where a path is imported.",
    "'{path}' is an address, and models are imported from paths.",
    "Download it and name its directory. A checkpoint of nxdt needs no import: 'nxdt checkpoint copy SRC DST' "
    "copies it from any store.",
)

ForeignFormatUnknown = NxdtError.define(
    "NXDT-S070",
    "A path that is to be imported and that no installed format recognises.",
    "'{path}' is not a checkpoint that can be imported: {reason}.{bad}",
    "Name one of: {known}.{more}",
    defaults={"install": (), "unusable": ()},
    also=lambda error: {
        "known": "; ".join(error.formats) or "no format is installed",
        "bad": unusable(error.unusable),
        "more": f" For further formats: {'; '.join(error.install)}." if error.install else "",
    },
)

ForeignConfigMissing = NxdtError.define(
    "NXDT-S071",
    "A foreign checkpoint does not say which model it is.",
    "'{path}' ({format}) does not say which model its weights are of.",
    "Name the configuration of that model: nxdt checkpoint import SRC DST --config my_run.yaml.",
)

ArchitectureUnread = NxdtError.define(
    "NXDT-S072",
    "No installed plugin reads an architecture of Hugging Face.",
    "No installed plugin reads {listed} of '{path}'.{bad}",
    "{way}; those here read {available:list}. Or name the model's configuration with --config.",
    usual_remedy="Install a plugin that reads the architecture, or name the model's configuration with --config.",
    defaults={"unusable": (), "install": None},
    also=lambda error: {
        "listed": f"the architecture {listing(error.architectures)}"
        if error.architectures
        else "the unnamed architecture",
        "bad": unusable(error.unusable),
        "way": f"Install the one that does: pip install {error.install}" if error.install else "Install one that does",
    },
)

WeightsPickled = NxdtError.define(
    "NXDT-S073",
    "A Hugging Face directory of the older kind, whose weights are pickles.",
    "The weights in '{path}' are pickles ({file}), which can run code when they are read; they never are.",
    'Where you trust them, convert them once: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{path}').save_pretrained('{path}-safetensors')\", and import that directory.",
)

ImportPlaceTaken = NxdtError.define(
    "NXDT-S074",
    "An import would replace a checkpoint, or be added to those of a run.",
    "'{uri}' holds a checkpoint of step {step} already.",
    "Import to another place, or delete that one first.",
)

SavedConfigUnusable = NxdtError.define(
    "NXDT-S075",
    "The model of a checkpoint cannot be built here.",
    "The checkpoint {where} is of a model that cannot be built here.",
    "{listed}",
    usual_remedy="Install the plugins of the run, or correct the keys that the message lists.",
    also=lambda error: {"listed": "\n  ".join(error.problems)},
)

ForeignHasWeightsOnly = NxdtError.define(
    "NXDT-S076",
    "A run is to resume from a checkpoint of another program, whose state it cannot use.",
    "A run cannot resume from '{path}' ({format}): of another program's checkpoint only weights are taken.",
    "Set checkpoint.weight_init_only=true to begin a new run with its weights.",
)

GgufLibraryMissing = NxdtError.define(
    "NXDT-S078",
    "An export to GGUF without the package that writes it.",
    "GGUF files need the package 'gguf', which cannot be imported: {reason}.",
    "Run: pip install 'nxdt-core[gguf]'",
)

GgufUnsupported = NxdtError.define(
    "NXDT-S079",
    "An export to GGUF of a model or a tokenizer that llama.cpp does not run in this form.",
    "The model cannot be written as GGUF: {reason}.",
    "GGUF is written of {known:list} with a BPE tokenizer. Export to Hugging Face's format instead: --format hf.",
)
