"""Fresh weights of a model with a residual stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nxdt_core.protocols.initialisation import InitRule

__all__ = ["residual_init_rules"]


def residual_init_rules(
    *,
    norms: Sequence[str],
    residual_writers: Sequence[str],
    std: float,
    num_layers: int,
    scaled: bool,
    norm_weight: float = 1.0,
) -> tuple[InitRule, ...]:
    """Return rules that make norms constant, biases zero and matrices normal.

    The matrices that write to the residual stream each add their variance to it. ``scaled`` divides their standard
    deviation by √(2 · ``num_layers``), so that the stream's variance does not depend on the depth (Radford et al. 2019,
    section 2.3).

    Args:
        norms: path patterns of the modules that normalise.
        residual_writers: path patterns of the parameters that write to the residual stream.
        std: standard deviation of the matrices.
        num_layers: layers of the model, each with two blocks that write to the stream.
        scaled: whether the matrices in ``residual_writers`` start narrower.
        norm_weight: scale of the norms at the start.
    """
    narrow = std / math.sqrt(2 * num_layers) if scaled else std
    return (
        *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=norm_weight) for norm in norms),
        InitRule(pattern="*.bias", distribution="constant"),
        *(InitRule(pattern=path, distribution="normal", std=narrow) for path in residual_writers),
        InitRule(pattern="*", distribution="normal", std=std),
    )
