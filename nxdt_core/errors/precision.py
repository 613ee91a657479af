"""Errors of precisions: codes ``NXDT-T03…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["NoMasterWeights"]


class NoMasterWeights(NxdtError):
    """Master weights are to be saved where a precision keeps none."""

    code = "NXDT-T030"
    happened = (
        "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt wants float32 as the model's weights, and "
        "the precision {precision} keeps them in {dtype} alone."
    )
    remedy = "Set it to false, or choose a precision.type with float32 weights, such as mixed_precision."
    precision: str
    dtype: str
