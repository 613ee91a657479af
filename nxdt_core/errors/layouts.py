"""Errors of models in layouts that they cannot have: codes ``NXDT-P07…``."""

from __future__ import annotations

from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError

__all__ = ["LayoutRefused", "ShardNotComputed"]


class LayoutRefused(NxdtError):
    """A model's plan says that, and why, it cannot be laid out along a mesh dimension."""

    code = "NXDT-P070"
    happened = "{model} cannot be laid out with {key}={size}: {reason}."
    remedy = "Set {key}=1."
    model: str
    dimension: str
    size: int
    reason: str

    _KEYS: ClassVar = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "key": f"distributed_strategy.{self._KEYS[self.dimension]}"}


class ShardNotComputed(NxdtError):
    """A model's plan can be applied, and the model cannot compute with the shards that it makes."""

    code = "NXDT-P071"
    happened = (
        "{model} cannot be computed with distributed_strategy.tensor_model_parallel_size={tp}: {place} fails on its"
        " shard ({reason}). {held}{named}"
    )
    remedy = "Set distributed_strategy.tensor_model_parallel_size=1, or correct the plan of the model's plugin."
    model: str
    tp: int
    module: str
    """Path of the innermost module that fails; empty where that is not known."""
    parameters: list[str]
    """Names and shapes of what that module holds on a rank."""
    entry: str
    """The plan's entry for it; empty where there is none."""
    reason: str

    def _view(self) -> dict[str, Any]:
        return {
            **super()._view(),
            "place": f"'{self.module}'" if self.module else "it",
            "held": f"A rank holds {', '.join(self.parameters)}. " if self.parameters else "",
            "named": f"The plan's entry is {self.entry}." if self.entry else "No entry of the plan names it.",
        }
