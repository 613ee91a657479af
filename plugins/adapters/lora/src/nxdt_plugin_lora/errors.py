"""Errors of this plugin: codes ``NXDT-L0…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

TargetNotFound = NxdtError.define(
    "NXDT-L001",
    "A name in ``target_modules`` or ``modules_to_save`` that matches nothing.",
    "adapter.{key}: '{name}' matches no {kind} of the model.",
    "Nearest are {candidates:list}; `{all_linear}` in target_modules means every linear layer.",
    also=lambda error: {"all_linear": "all-linear"},
)

LayerNotAdaptable = NxdtError.define(
    "NXDT-L002",
    "An option does not fit a layer that was asked for.",
    "adapter: '{path}' is {layer}, and {option} is for {fits}.",
    "Take it out of adapter.target_modules, or set {option} to its default.",
    defaults={"fits": "linear layers and embeddings"},
)

NoPeftForm = NxdtError.define(
    "NXDT-L003",
    "An update that peft has no file for.",
    "The update of '{parameter}' has no form in peft: {reason}.",
    "Merge it instead: nxdt checkpoint merge-lora SRC DST.",
)

AdapterFileDamaged = NxdtError.define(
    "NXDT-L004",
    "A file of a peft directory cannot be used.",
    "'{path}' is not a readable adapter: {reason}.",
    "Name a directory with adapter_config.json and adapter_model.safetensors; pickles (.bin) are never read.",
)


_SET_KEYS = "Set these keys of the section adapter to what the saved adapter has."

AdapterDiffers = NxdtError.define(
    "NXDT-L005",
    "A saved adapter was trained with other options than the run's, and would compute something else.",
    "The adapter at '{where}' is another than this run's section adapter describes: {differences:; }.",
    "{what_to_do}",
    usual_remedy="Set the keys of section adapter to what the adapter was trained with.",
    defaults={"remedies": ()},
    also=lambda error: {"what_to_do": " ".join(dict.fromkeys(error.remedies)) or _SET_KEYS},
)

NoAdapterHere = NxdtError.define(
    "NXDT-L006",
    "A checkpoint of a run without LoRA.",
    "The checkpoint '{where}' has no LoRA adapter.",
    "Name a checkpoint of a run with adapter.name=lora.",
)

MergeUnties = NxdtError.define(
    "NXDT-L007",
    "The embedding and the head share a matrix, and only one of them has the update.",
    "'{owner}' and '{user}' are one matrix, of which LoRA has updated one use: merged they would be two.",
    "Keep the adapter (nxdt checkpoint export-lora), or train without embedding and head in target_modules.",
)

TargetSavedWhole = NxdtError.define(
    "NXDT-L008",
    "A target whose layers all train whole already.",
    "adapter.target_modules: '{name}' means {paths:list3}, which adapter.modules_to_save trains whole.",
    "Take it out of one of the two keys.",
)

BaseIsNoReference = NxdtError.define(
    "NXDT-L009",
    "The frozen base as the reference of a run that begins with another model.",
    "The objective {objective!r} asks the frozen base for the reference at every step, and the run begins with an "
    "adapter that changes it: that base is not the model that the run begins with.",
    "Set objective.precompute_ref_log_probs to true, which asks the model that the run begins with, once; or merge "
    "that adapter (nxdt checkpoint merge-lora) and begin with the merged model.",
)
