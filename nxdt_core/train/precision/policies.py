"""What each policy says of a run's dtypes."""

from __future__ import annotations

from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train.precision.config import BF16SRConfig, ManualConfig

__all__ = ["autocast", "bf16_sr", "fp32", "manual", "mixed_precision", "mixed_precision_sr"]


def fp32(config: object) -> PrecisionPolicy:
    """Return a policy with everything in float32."""
    return PrecisionPolicy(name="fp32")


def autocast(config: object) -> PrecisionPolicy:
    """float32 parameters, gradients and optimizer state; matrix products in bfloat16 under ``torch.autocast``."""
    return PrecisionPolicy(name="autocast", autocast="bfloat16")


def mixed_precision(config: object) -> PrecisionPolicy:
    """Forward and backward in bfloat16; weights, sums of gradients and optimizer state in float32."""
    return PrecisionPolicy(name="mixed_precision", parameters="bfloat16", master_weights=True)


def mixed_precision_sr(config: object) -> PrecisionPolicy:
    """Return :func:`mixed_precision` with stochastic rounding: the copies that forward and backward use are rounded
    stochastically."""
    return PrecisionPolicy(
        name="mixed_precisionSR", parameters="bfloat16", master_weights=True, stochastic_rounding=True
    )


def bf16_sr(config: BF16SRConfig) -> PrecisionPolicy:
    """Return the weights and gradients in bfloat16 alone; the optimizer's update is rounded into the weights
    stochastically."""
    return config.policy()


def manual(config: ManualConfig) -> PrecisionPolicy:
    """Return what NxD Training's switches ask for."""
    return config.policy()
