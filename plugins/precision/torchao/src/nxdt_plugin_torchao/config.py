"""The sections of the policy ``float8`` and of the optimizer ``adamw_8bit``, and the policy.

torch is imported when a model is laid out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from nxdt_core.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, Section
from nxdt_core.protocols.precision import PrecisionPolicy

if TYPE_CHECKING:
    from nxdt_plugin_torchao.product import Float8Product


class Float8Config(Section):
    """Matrix products in float8."""

    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """Scope of a scaling factor: a whole tensor, which is fastest, or a row or column, which is more accurate.
    ``rowwise_with_gw_hp`` computes gradients of weights in bfloat16. The names are those of torchao's recipes."""
    rest: Literal["mixed_precision", "autocast"] = "mixed_precision"
    """Policy for everything else: bfloat16 parameters with float32 masters, or float32 parameters under
    ``torch.autocast``."""
    skip: tuple[str, ...] = ()
    """Patterns of layers whose products stay in bfloat16, such as ``*.down_proj``. A ``*`` at the start stands for any
    number of components of a path, any other for one."""

    all_gather: Literal["float8", "bfloat16"] | None = None
    """Format in which FSDP gathers the weights of these products. ``float8`` is one byte per element and needs
    ``tensorwise``, where it is the default and changes no result. Rows have other scaling factors in backward than in
    forward, so that row-wise scaling needs bfloat16."""

    @property
    def gathers_float8(self) -> bool:
        """Return whether weights are gathered in float8."""
        return self.all_gather != "bfloat16" and self.scaling == "tensorwise"

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.all_gather == "float8" and self.scaling != "tensorwise":
            yield "all_gather", f"float8 needs scaling: tensorwise; use bfloat16 with {self.scaling}"

    def dtypes(self) -> PrecisionPolicy:
        """Return the policy without the products."""
        if self.rest == "autocast":
            return PrecisionPolicy(name="float8", autocast="bfloat16")
        return PrecisionPolicy(name="float8", parameters="bfloat16", master_weights=True)


class AdamW8bitConfig(Section):
    """AdamW whose running means have 8 bits per element and a scaling factor per block."""

    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.999)
    """Decay of the running mean and of the running square."""
    eps: Annotated[float, Range(1e-300, None)] = 1e-8
    """Added to the root of the running square."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices and embeddings."""
    block_size: PositiveInt = 256
    """Consecutive elements of a row that share a scaling factor. Matrices with shorter rows have state in float32."""
    min_8bit_size: NonNegativeInt = 4096
    """Elements from which a matrix has state in 8 bits. Smaller ones, norms and biases have it in float32."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if not all(beta < 1 for beta in self.betas):
            yield "betas", "each must be below 1"


def float8(config: Float8Config) -> PrecisionPolicy:
    """Return the policy that multiplies in float8 in the layers that ``config`` does not skip."""
    return replace(config.dtypes(), linear_product=_Products(config.scaling, config.skip, config.gathers_float8))


@dataclass(frozen=True, slots=True)
class _Products:
    """The products of one section; policies of equal sections are equal."""

    scaling: str
    skip: tuple[str, ...]
    gathers: bool

    def __call__(self, device_type: str) -> Float8Product:
        from nxdt_plugin_torchao.product import Float8Product

        return Float8Product(self.scaling, self.skip, device_type, gathers=self.gathers)
