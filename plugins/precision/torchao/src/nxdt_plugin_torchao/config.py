"""The section ``precision`` of the policy ``float8``. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nxdt_core.protocols.precision import PrecisionPolicy, capabilities_of

__all__ = ["Float8Config"]


@dataclass(kw_only=True)
class Float8Config:
    """Matrix products in float8."""

    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """What shares a scaling factor: a whole tensor, which is fastest, or a row or column, which is more accurate.
    ``rowwise_with_gw_hp`` computes gradients of weights in bfloat16. The names are those of torchao's recipes."""
    rest: Literal["mixed_precision", "autocast"] = "mixed_precision"
    """Policy for everything else: bfloat16 parameters with float32 masters, or float32 parameters under
    ``torch.autocast``."""
    skip: tuple[str, ...] = ()
    """Patterns of layers whose products stay in bfloat16, such as ``*.down_proj``. A ``*`` at the start stands for any
    number of components of a path, any other for one."""

    def requires_capabilities(self) -> Iterable[str]:
        """Yield the capabilities of the engine that the values ask for."""
        return capabilities_of(self.dtypes())

    def dtypes(self) -> PrecisionPolicy:
        """Return the policy without the products."""
        if self.rest == "autocast":
            return PrecisionPolicy(name="float8", autocast="bfloat16")
        return PrecisionPolicy(name="float8", parameters="bfloat16", master_weights=True)
