"""The policy ``float8``. torch is imported when a model is laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_plugin_torchao.config import Float8Config

if TYPE_CHECKING:
    from nxdt_plugin_torchao.product import Float8Product


def float8(config: Float8Config) -> PrecisionPolicy:
    """Return the policy that multiplies in float8 in the layers that ``config`` does not skip."""
    return replace(config.dtypes(), linear_product=_Products(config.scaling, config.skip, config.gathers_float8))


@dataclass(frozen=True, slots=True)
class _Products:
    scaling: str
    skip: tuple[str, ...]
    gathers: bool

    def __call__(self, device_type: str) -> Float8Product:
        from nxdt_plugin_torchao.product import Float8Product

        return Float8Product(self.scaling, self.skip, device_type, gathers=self.gathers)
