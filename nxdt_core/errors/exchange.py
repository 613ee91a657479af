"""Errors of exporting checkpoints to other formats and importing from them: codes ``NXDT-S07…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError, listing

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
        "bad": f" Installed but unusable: {'; '.join(error.unusable)}." if error.unusable else "",
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
        "bad": f" Installed but unusable: {'; '.join(error.unusable)}." if error.unusable else "",
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
