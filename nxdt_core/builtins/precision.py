"""Built-in precision policies: data, no torch."""

from __future__ import annotations

from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["autocast", "fp32"]


def fp32(config: object) -> PrecisionPolicy:
    """Everything in float32."""
    return PrecisionPolicy(name="fp32")


def autocast(config: object) -> PrecisionPolicy:
    """float32 parameters, gradients and optimizer state; matrix products in bfloat16 under ``torch.autocast``."""
    return PrecisionPolicy(name="autocast", autocast="bfloat16")
