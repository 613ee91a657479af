"""Errors of exporting checkpoints to other formats and importing from them: codes ``NXDT-S07…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "ArchitectureUnread",
    "ForeignConfigMissing",
    "ForeignFormatUnknown",
    "ForeignHasWeightsOnly",
    "ForeignSourceIsAddress",
    "ImportPlaceTaken",
    "SavedConfigUnusable",
    "WeightsPickled",
]


class ForeignSourceIsAddress(NxdtError):
    """An address where a path is imported."""

    code = "NXDT-S077"
    happened = "'{path}' is an address, and models are imported from paths."
    remedy = (
        "Download it and name its directory. A checkpoint of nxdt needs no import: 'nxdt checkpoint copy SRC DST' "
        "copies it from any store."
    )
    path: str


class ForeignFormatUnknown(NxdtError):
    """A path that is to be imported and that no installed format recognises."""

    code = "NXDT-S070"
    happened = "'{path}' is not a checkpoint that can be imported: {reason}.{bad}"
    remedy = "Name one of: {known}.{more}"
    path: str
    reason: str
    formats: list[str]
    """Each in a few words."""
    install: tuple[str, ...] = ()
    """``pip install DIST (names)`` for each known distribution of formats that is not installed."""
    unusable: tuple[str, ...] = ()
    """One sentence for each installed plugin that cannot be used and might have recognised it."""

    def _view(self) -> dict[str, Any]:
        return {
            **super()._view(),
            "known": "; ".join(self.formats) or "no format is installed",
            "bad": f" Installed but unusable: {'; '.join(self.unusable)}." if self.unusable else "",
            "more": f" For further formats: {'; '.join(self.install)}." if self.install else "",
        }


class ForeignConfigMissing(NxdtError):
    """A foreign checkpoint does not say which model it is."""

    code = "NXDT-S071"
    happened = "'{path}' ({format}) does not say which model its weights are of."
    remedy = "Name the configuration of that model: nxdt checkpoint import SRC DST --config my_run.yaml."
    path: str
    format: str


class ArchitectureUnread(NxdtError):
    """No installed plugin reads an architecture of Hugging Face."""

    code = "NXDT-S072"
    happened = "No installed plugin reads {listed} of '{path}'.{bad}"
    remedy = "{way}; those here read {readable}. Or name the model's configuration with --config."
    usual_remedy = "Install a plugin that reads the architecture, or name the model's configuration with --config."
    path: str
    architectures: list[str]
    available: list[str]
    unusable: tuple[str, ...] = ()
    """One sentence for each installed plugin that cannot be used and might read it."""
    install: str | None = None
    """Distribution that is known to read it and is not installed."""

    def _view(self) -> dict[str, Any]:
        listed = f"the architecture {listing(self.architectures)}" if self.architectures else "the unnamed architecture"
        return {
            **super()._view(),
            "listed": listed,
            "bad": f" Installed but unusable: {'; '.join(self.unusable)}." if self.unusable else "",
            "way": f"Install the one that does: pip install {self.install}"
            if self.install
            else "Install one that does",
            "readable": listing(self.available) or "none",
        }


class WeightsPickled(NxdtError):
    """A Hugging Face directory of the older kind, whose weights are pickles."""

    code = "NXDT-S073"
    happened = "The weights in '{path}' are pickles ({file}), which can run code when they are read; they never are."
    remedy = (
        'Where you trust them, convert them once: python -c "from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained('{path}').save_pretrained('{path}-safetensors')\", and import that directory."
    )
    path: str
    file: str


class ImportPlaceTaken(NxdtError):
    """An import would replace a checkpoint, or be added to those of a run."""

    code = "NXDT-S074"
    happened = "'{uri}' holds a checkpoint of step {step} already."
    remedy = "Import to another place, or delete that one first."
    uri: str
    step: int


class SavedConfigUnusable(NxdtError):
    """The model of a checkpoint cannot be built here."""

    code = "NXDT-S075"
    happened = "The checkpoint {where} is of a model that cannot be built here."
    remedy = "{listed}"
    usual_remedy = "Install the plugins of the run, or correct the keys that the message lists."
    where: str
    problems: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": "\n  ".join(self.problems)}


class ForeignHasWeightsOnly(NxdtError):
    """A run is to resume from a checkpoint of another program, whose state it cannot use."""

    code = "NXDT-S076"
    happened = "A run cannot resume from '{path}' ({format}): of another program's checkpoint only weights are taken."
    remedy = "Set checkpoint.weight_init_only=true to begin a new run with its weights."
    path: str
    format: str
