"""The policies as components. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["POLICIES"]

_HERE = "nxdt_core.train.precision"

_BFLOAT16 = ("bf16", "bfloat16", "bf16-mixed", "mixed")

POLICIES = (
    Component(
        name="fp32",
        target=f"{_HERE}.policies:fp32",
        summary="everything in float32",
        suggested_for=("float32", "32-true", "32", "float", "no"),
    ),
    Component(
        name="mixed_precision",
        target=f"{_HERE}.policies:mixed_precision",
        requires=frozenset({"dtype:bfloat16", "master_weights", "gradient_dtype"}),
        summary="bfloat16 compute; float32 masters, sums of gradients and optimizer state",
        suggested_for=(*_BFLOAT16, "fp16", "float16", "16-mixed"),
    ),
    Component(
        name="mixed_precisionSR",
        target=f"{_HERE}.policies:mixed_precision_sr",
        requires=frozenset({"dtype:bfloat16", "master_weights", "gradient_dtype", "stochastic_rounding"}),
        summary="mixed_precision, masters rounded stochastically to the bfloat16 that is computed with",
        aliases=("mixed_precision_SR",),
    ),
    Component(
        name="bf16SR",
        target=f"{_HERE}.policies:bf16_sr",
        config=f"{_HERE}.config:BF16SRConfig",
        requires=frozenset({"dtype:bfloat16", "stochastic_rounding"}),
        summary="bfloat16 weights and gradients without masters, updates rounded stochastically",
        suggested_for=("bf16-true",),
    ),
    Component(
        name="autocast",
        target=f"{_HERE}.policies:autocast",
        requires=frozenset({"autocast"}),
        summary="float32 parameters, bfloat16 compute under torch.autocast",
        suggested_for=(*_BFLOAT16, "amp"),
    ),
    Component(
        name="manual",
        target=f"{_HERE}.policies:manual",
        config=f"{_HERE}.config:ManualConfig",
        summary="by NxD Training's switches: master_weights, fp32_grad_acc, xla_downcast_bf16, ...",
    ),
)
"""All of them, under the names of NxD Training."""
