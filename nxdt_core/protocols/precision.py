"""Kind ``precision``: the dtypes of a run, as data.

Example::

    def mixed_precision(config: MixedConfig) -> PrecisionPolicy:
        return PrecisionPolicy(name="mixed_precision", parameters="bfloat16", master_weights=True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DType", "LinearProduct", "PrecisionFactory", "PrecisionPolicy", "ScaledCast"]

DType = Literal["float64", "float32", "bfloat16", "float16"]
"""Names of torch dtypes, so that policies can be read without torch."""


class ScaledCast(Protocol):
    """Conversion of a weight to one byte per element, with one scaling factor of the whole weight.

    A product must be bitwise the same of what :meth:`widened` returns as of the weight.
    """

    def scales(self, maxima: Tensor) -> Tensor:
        """Return the scaling factors of weights, float32, from the largest absolute value of each, float32."""

    def narrowed(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return elements of a weight in a dtype of one byte; ``scale`` is a scalar of :meth:`scales`."""

    def widened(self, sent: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return in ``dtype`` the values of bytes, uint8, that :meth:`narrowed` made."""


class LinearProduct(Protocol):
    """Matrix product of linear layers in place of ``torch.nn.functional.linear``."""

    gathered: ScaledCast | None
    """Cast in which FSDP2 gathers the weights of these layers; None: in the compute dtype of the run."""

    def covers(self, name: str, out_features: int, in_features: int) -> bool:
        """Return whether it computes the product of a layer; the others stay as they are.

        Args:
            name: path of the layer in the model.
            out_features: rows of this rank's part of the weight.
            in_features: columns of this rank's part of the weight.

        Raises:
            NxdtError: it should, and cannot with these sizes.
        """

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return ``hidden`` [..., in] times ``weight`` [out, in] transposed, [..., out]; differentiable.

        Both have the dtypes that the layer has them in: under autocast, casting them is up to this call
        (:func:`nxdt_core.models.autocast.compute_dtype`).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes of the tensors of a run. Engines apply it; models do not see it."""

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
    linear_product: Callable[[str], LinearProduct] | None = None
    """Returns, for a device type such as ``cuda`` (``unlisted`` where a run is planned without memory), what computes
    the products of the linear layers that the model's plan names; None: torch, in the compute dtype. The product of
    the vocabulary head, of layers with tied weights and of experts stays torch's."""


class PrecisionFactory(Protocol):
    """The target of the kind: a callable; ``config`` is the section ``precision``.

    It is called when a configuration is checked, so its module does not import torch.
    """

    def __call__(self, config: Any) -> PrecisionPolicy:
        """Return the dtypes of a run from the section ``precision``."""
