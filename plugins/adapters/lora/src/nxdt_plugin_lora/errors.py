"""Errors of this plugin: codes ``NXDT-L0…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

__all__ = [
    "AdapterDiffers",
    "AdapterFileDamaged",
    "BaseIsNoReference",
    "LayerNotAdaptable",
    "MergeUnties",
    "NoAdapterHere",
    "NoPeftForm",
    "TargetNotFound",
    "TargetSavedWhole",
]


class TargetNotFound(NxdtError):
    """A name in ``target_modules`` or ``modules_to_save`` that matches nothing."""

    code = "NXDT-L001"
    happened = "adapter.{key}: '{name}' matches no {kind} of the model."
    remedy = "Nearest are {near}; `{all_linear}` in target_modules means every linear layer."
    key: str
    name: str
    kind: str
    candidates: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "near": listing(self.candidates) or "none", "all_linear": "all-linear"}


class LayerNotAdaptable(NxdtError):
    """An option does not fit a layer that was asked for."""

    code = "NXDT-L002"
    happened = "adapter: '{path}' is {layer}, and {option} is for linear layers and embeddings."
    remedy = "Take it out of adapter.target_modules, or set {option} to its default."
    path: str
    layer: str
    option: str


class NoPeftForm(NxdtError):
    """An update that peft has no file for."""

    code = "NXDT-L003"
    happened = "The update of '{parameter}' has no form in peft: {reason}."
    remedy = "Merge it instead: nxdt checkpoint merge-lora SRC DST."
    parameter: str
    reason: str


class AdapterFileDamaged(NxdtError):
    """A file of a peft directory cannot be used."""

    code = "NXDT-L004"
    happened = "'{path}' is not a readable adapter: {reason}."
    remedy = "Name a directory with adapter_config.json and adapter_model.safetensors; pickles (.bin) are never read."
    path: str
    reason: str


class AdapterDiffers(NxdtError):
    """A saved adapter was trained with other options than the run's, and would compute something else."""

    code = "NXDT-L005"
    happened = "The adapter at '{where}' is another than this run's section adapter describes: {listed}."
    remedy = "{what_to_do}"
    usual_remedy = "Set the keys of section adapter to what the adapter was trained with."
    where: str
    differences: list[str]
    remedies: tuple[str, ...] = ()
    """Where the section has no such keys."""

    def _view(self) -> dict[str, Any]:
        own = "Set these keys of the section adapter to what the saved adapter has."
        what_to_do = " ".join(dict.fromkeys(self.remedies)) or own
        return {**super()._view(), "listed": "; ".join(self.differences), "what_to_do": what_to_do}


class NoAdapterHere(NxdtError):
    """A checkpoint of a run without LoRA."""

    code = "NXDT-L006"
    happened = "The checkpoint '{where}' has no LoRA adapter."
    remedy = "Name a checkpoint of a run with adapter.name=lora."
    where: str


class MergeUnties(NxdtError):
    """The embedding and the head share a matrix, and only one of them has the update."""

    code = "NXDT-L007"
    happened = "'{owner}' and '{user}' are one matrix, of which LoRA has updated one use: merged they would be two."
    remedy = "Keep the adapter (nxdt checkpoint export-lora), or train without embedding and head in target_modules."
    owner: str
    user: str


class TargetSavedWhole(NxdtError):
    """A target whose layers all train whole already."""

    code = "NXDT-L008"
    happened = "adapter.target_modules: '{name}' means {modules}, which adapter.modules_to_save trains whole."
    remedy = "Take it out of one of the two keys."
    name: str
    paths: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "modules": listing(self.paths, 3)}


class BaseIsNoReference(NxdtError):
    """The frozen base as the reference of a run that begins with another model."""

    code = "NXDT-L009"
    happened = (
        "The objective {objective!r} asks the frozen base for the reference at every step, and the run begins with an "
        "adapter that changes it: that base is not the model that the run begins with."
    )
    remedy = (
        "Set objective.precompute_ref_log_probs to true, which asks the model that the run begins with, once; or merge "
        "that adapter (nxdt checkpoint merge-lora) and begin with the merged model."
    )
    objective: str
