"""Errors of this plugin: codes ``NXDT-T10…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

__all__ = ["Float8SizesDoNotDivide", "No8bitStateHere", "NoFloat8Here"]


class Float8SizesDoNotDivide(NxdtError):
    """A layer whose features on a rank are not a multiple of 16, which float8 products of GPUs need."""

    code = "NXDT-T100"
    happened = "precision: '{path}' has {inputs} inputs and {outputs} outputs on each rank, not multiples of {unit}."
    remedy = (
        "Choose other sizes or another tensor_model_parallel_size, or leave its products in bfloat16 with "
        "precision.skip=[{path}]."
    )
    path: str
    inputs: int
    outputs: int
    unit: int


class NoFloat8Here(NxdtError):
    """A device that has no float8 products."""

    code = "NXDT-T101"
    happened = "precision.type is float8, and {device} has no float8 matrix products: {reason}."
    remedy = "Run it on a GPU of compute capability 8.9 or later, or with precision.type=mixed_precision."
    device: str
    reason: str


class No8bitStateHere(NxdtError):
    """A device on which the optimizer was never tried."""

    code = "NXDT-T102"
    happened = "model.optim.name is adamw_8bit, which runs on GPUs and CPUs, and this device is {device}."
    remedy = "Use model.optim.name=adamw, or adafactor, whose state is small, too."
    device: str
