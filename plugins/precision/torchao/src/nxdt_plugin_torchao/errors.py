"""Errors of this plugin: codes ``NXDT-T10…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

Float8SizesDoNotDivide = NxdtError.define(
    "NXDT-T100",
    "A layer whose features on a rank are not a multiple of 16, which float8 products of GPUs need.",
    "precision: '{path}' has {inputs} inputs and {outputs} outputs on each rank, not multiples of {unit}.",
    "Choose other sizes or another tensor_model_parallel_size, or leave its products in bfloat16 with "
    "precision.skip=[{path}].",
)

NoFloat8Here = NxdtError.define(
    "NXDT-T101",
    "A device that has no float8 products.",
    "precision.type is float8, and {device} has no float8 matrix products: {reason}.",
    "Run it on a GPU of compute capability 8.9 or later, or with precision.type=mixed_precision.",
)

No8bitStateHere = NxdtError.define(
    "NXDT-T102",
    "A device on which the optimizer was never tried.",
    "model.optim.name is adamw_8bit, which runs on GPUs and CPUs, and this device is {device}.",
    "Use model.optim.name=adamw, or adafactor, whose state is small, too.",
)
