"""Kind ``precision_policy``: the dtypes of a run, as data.

Example::

    def mixed_precision(config: MixedConfig) -> PrecisionPolicy:
        return PrecisionPolicy(name="mixed_precision", parameters="bfloat16", master_weights=True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = ["DType", "PrecisionFactory", "PrecisionPolicy", "capabilities_of"]

DType = Literal["float64", "float32", "bfloat16", "float16"]
"""Names of torch dtypes, so that policies can be read without torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Which dtype each tensor of a run has. Engines apply it; models do not see it."""

    name: str
    parameters: DType = "float32"
    """Parameters as forward and backward use them."""
    autocast: DType | None = None
    """Compute dtype of ``torch.autocast`` around forward; None for none."""
    gradients: DType = "float32"
    """Sums of gradients, across micro-batches and across ranks."""
    optimizer_state: DType = "float32"
    master_weights: bool = False
    """Keep float32 copies of the parameters, which the optimizer updates."""
    stochastic_rounding: bool = False
    """Round into ``parameters`` stochastically (Gupta et al. 2015, arXiv:1502.02551): the masters' copies that are
    computed with, or the update where there are no masters."""


def capabilities_of(policy: PrecisionPolicy) -> frozenset[str]:
    """Return the capabilities of :data:`nxdt_core.api.CAPABILITIES` that an engine must declare to apply ``policy``.

    float32 parameters, gradients and state need none; nor do gradients and state of the parameters' own dtype.
    """
    updated = "float32" if policy.master_weights else policy.parameters
    asked = {
        f"dtype:{policy.parameters}": policy.parameters != "float32",
        "autocast": policy.autocast is not None,
        "master_weights": policy.master_weights,
        "gradient_dtype": policy.gradients != policy.parameters,
        "optimizer_dtype": policy.optimizer_state != updated,
        "stochastic_rounding": policy.stochastic_rounding,
    }
    return frozenset(name for name, needed in asked.items() if needed)


class PrecisionFactory(Protocol):
    """The target of the kind: a callable; ``config`` is the dataclass of ``precision``."""

    def __call__(self, config: Any) -> PrecisionPolicy:
        """Return the dtypes of a run from the dataclass of the section ``precision``."""
        ...
