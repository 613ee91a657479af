"""Errors of this plugin: codes ``NXDT-L0…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

__all__ = ["LayerNotAdaptable", "TargetNotFound"]


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
    happened = "adapter: '{path}' is {what}, and {option} is for linear layers."
    remedy = "Take it out of adapter.target_modules, or set {option} to its default."
    path: str
    what: str
    option: str
