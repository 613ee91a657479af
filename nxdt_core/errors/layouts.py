"""Errors of models in layouts that they cannot have: codes ``NXDT-P07…``."""

from __future__ import annotations

from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError

__all__ = ["LayoutRefused"]


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
