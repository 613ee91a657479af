"""Errors around averaged weights."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["CheckpointHasNoAverage"]


class CheckpointHasNoAverage(NxdtError):
    """Averaged weights are asked of a checkpoint without them."""

    code = "NXDT-S090"
    happened = "{where} holds no average of the weights."
    remedy = "Export the weights themselves, without --ema; exp_manager.ema.enable=true lets a run keep an average."
    where: str
