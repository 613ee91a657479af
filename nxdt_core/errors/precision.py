"""Errors of precisions: codes ``NXDT-T03…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["GradientSumsRounded", "NoMasterWeights"]


class GradientSumsRounded(NxdtError):
    """Sums of gradients that a layout would keep in less than a precision says."""

    code = "NXDT-T031"
    happened = (
        "The precision {precision} sums up gradients in {sums} and keeps weights in {weights} alone; ZeRO-{stage} adds "
        "up the {micro_batches} micro-batches of a step in the dtype of the weights that it shards."
    )
    remedy = (
        "Set distributed_strategy.zero_stage to 1, keep float32 weights (precision.master_weights: true under manual), "
        "or let data.micro_batch_size make one micro-batch of a step."
    )
    precision: str
    sums: str
    weights: str
    stage: int
    micro_batches: int


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
