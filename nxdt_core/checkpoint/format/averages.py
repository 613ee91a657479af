"""The average of the weights that a checkpoint may hold in addition to them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.errors.checkpoints import CheckpointHasNoAverage

__all__ = ["AVERAGE", "average_index", "has_average"]

AVERAGE = "ema"
"""Optimizer state ``<parameter name>/ema``: the exponential moving average of that weight, in float32."""


def has_average(manifest: Manifest) -> bool:
    """Return whether the run kept one."""
    return any(key.endswith(f"/{AVERAGE}") for key in manifest.tensors.get("optim", {}))


def average_index(manifest: Manifest, *, where: str) -> Mapping[str, TensorEntry]:
    """Return the model's tensors by name, those with an average replaced by it; the others were not trained.

    Raises:
        CheckpointHasNoAverage: there is none; ``where`` names the checkpoint.
    """
    if not has_average(manifest):
        raise CheckpointHasNoAverage(where=where)
    state = manifest.tensors["optim"]
    return {name: state.get(f"{name}/{AVERAGE}", entry) for name, entry in manifest.tensors.get("model", {}).items()}
