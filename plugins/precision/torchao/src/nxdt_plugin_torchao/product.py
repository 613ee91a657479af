"""The product of a linear layer in float8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call

from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.precision import ScaledCast
from nxdt_plugin_torchao.blocks import without_warnings
from nxdt_plugin_torchao.errors import Float8SizesDoNotDivide, NoFloat8Here

with without_warnings():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

_UNIT = 16
"""Features that ``torch._scaled_mm`` multiplies at a time."""
_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with float8 products: Ada and Hopper."""


class Float8Product:
    """Casts both factors to float8 with dynamic scaling factors, in backward, too; the result has the dtype that is
    computed in otherwise.

    On CPU the products of the rounded factors are computed in float32: the same rounding, slower. See
    :class:`nxdt_core.protocols.precision.LinearProduct`.
    """

    def __init__(self, scaling: str, skip: Sequence[str], device_type: str, *, gathers: bool = False) -> None:
        """
        Args:
            scaling: name of a recipe of torchao.
            skip: patterns of layers that it does not cover.
            device_type: torch's device type of the run, such as ``cuda``.
            gathers: let FSDP2 gather weights in float8; for scaling of whole tensors.

        Raises:
            NoFloat8Here: the device has no float8 products.
        """
        self._skip = skip
        self._emulated = device_type != "cuda"
        if device_type not in ("cuda", "cpu", "unlisted"):
            raise NoFloat8Here(device=device_type, reason="torchao multiplies in float8 on CUDA GPUs")
        if device_type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            if (major, minor) < _CAPABILITY:
                reason = f"its compute capability is {major}.{minor}"
                raise NoFloat8Here(device=torch.cuda.get_device_name(), reason=reason)
        recipe = Float8LinearConfig.from_recipe_name(scaling)
        if self._emulated:
            object.__setattr__(recipe, "emulate", True)  # frozen, and dataclasses.replace() loses the target dtypes
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1, 1, bias=False))
        (self._layer,) = convert_to_float8_training(model, config=recipe)
        """Layer on the meta device; each call replaces its weight."""
        self.gathered: ScaledCast | None = Float8Cast(recipe.cast_config_weight.target_dtype) if gathers else None

    def covers(self, name: str, out_features: int, in_features: int) -> bool:
        """Return whether a layer is computed in float8.

        Raises:
            Float8SizesDoNotDivide: its sizes on this rank do not allow it.
        """
        if matches_any(self._skip, name):
            return False
        if not self._emulated and (out_features % _UNIT or in_features % _UNIT):
            raise Float8SizesDoNotDivide(path=name, inputs=in_features, outputs=out_features, unit=_UNIT)
        return True

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return [..., in] times [out, in] transposed, [..., out]."""
        dtype = compute_dtype(hidden)
        rows = hidden.to(dtype).flatten(0, -2)  # as backward scales them, so that a graph has their maximum once
        result: torch.Tensor = functional_call(self._layer, {"weight": weight.to(dtype)}, (rows,))
        return result.view(*hidden.shape[:-1], -1)


class Float8Cast:
    """Weights on their way between ranks: rounded as the product of scaled tensors rounds them.

    The largest element is the largest number of float8, so that the product finds the same scaling factor in what
    arrives, and each rounded element is rounded to itself. See :class:`nxdt_core.protocols.precision.ScaledCast`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: of one byte, as the product casts weights."""
        self._dtype = dtype

    def scales(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return torchao's scaling factors of weights with these largest absolute values."""
        scales: torch.Tensor = amax_to_scale(maxima, self._dtype)
        return scales

    def narrowed(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return ``values`` in float8."""
        quantized: torch.Tensor = to_fp8_saturated(values.float() * scale, self._dtype)
        return quantized

    def widened(self, sent: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of bytes in ``dtype``."""
        return (sent.view(self._dtype).float() / scale).to(dtype)
