"""Frozen weights in 4 or 8 bits, which matrix products read in the dtype that they compute in.

``nf4`` is that of QLoRA (Dettmers et al. 2023, arXiv:2305.14314): blocks of 64 elements of a rank's part in row-major
order, the last of which may be shorter, are divided by their largest magnitude, and each quotient becomes the nearest
of 16 quantiles of a normal distribution. The magnitudes, less their mean, are quantised too: 8 bits each, in groups of
256. That is
``4 + 8 / 64 + 32 / (64 * 256) = 4.127`` bits an element. ``int8`` divides each row by its largest magnitude (Dettmers
et al. 2022, arXiv:2208.07339, without its outliers): 8 bits an element and 32 a row.

The package ``bitsandbytes`` quantises and dequantises, on CPUs and CUDA GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Self

import torch
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from nxdt_core.errors.models import QuantisationLibraryMissing
from nxdt_core.models.autocast import compute_dtype

BaseDtype = Literal["nf4", "int8"]

_BLOCK = 64
"""Elements that share a magnitude in nf4."""
_GROUP = 256
"""Magnitudes of blocks that share one."""
_AT_ONCE = 2**20
"""Elements that are quantised at a time."""
_PARTS = ("codes", "scales", "groups", "samples")


class QuantisedWeight(torch.Tensor):
    """A matrix [out, in] of a linear layer, which has a dtype and the values that its codes stand for.

    ``functional.linear`` keeps the codes for backward, and not the values. ``copy_`` quantises. What else is done with
    it is done with its values, which exist for that time.
    """

    codes: torch.Tensor
    """uint8 [out * in / 2], two elements each, or int8 [out, in]; these numbers and those of blocks are rounded up."""
    scales: torch.Tensor
    """Magnitudes of blocks: uint8 [out * in / 64]. Of rows: float32 [out]."""
    groups: torch.Tensor
    """Mean of the magnitudes, then one magnitude per group of them, float32; empty for int8."""
    samples: torch.Tensor
    """Elements at ``places`` of what was quantised, bfloat16."""
    places: tuple[int, ...]
    """Positions of elements in row-major order, by which a digest recognises the weight."""

    @staticmethod
    def __new__(
        cls: type[QuantisedWeight],
        parts: Sequence[torch.Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        places: tuple[int, ...],
    ) -> QuantisedWeight:
        """``parts``: codes, scales, groups and samples."""
        quantised_weight: QuantisedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=parts[0].device, requires_grad=False
        )
        quantised_weight.codes, quantised_weight.scales, quantised_weight.groups, quantised_weight.samples = parts
        quantised_weight.places = places
        return quantised_weight

    @classmethod
    def empty(cls, weight: torch.Tensor, dtype: BaseDtype, places: Sequence[int] = ()) -> Self:
        """Return one without values in place of ``weight`` [out, in], on its device."""
        rows, columns = weight.shape
        blocks = -(-weight.numel() // _BLOCK)

        def part(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=weight.device)

        if dtype == "nf4":
            codes, scales = part(-(-weight.numel() // 2), dtype=torch.uint8), part(blocks, dtype=torch.uint8)
            groups = part(1 - -blocks // _GROUP, dtype=torch.float32)
        else:
            codes, scales = part(rows, columns, dtype=torch.int8), part(rows, dtype=torch.float32)
            groups = part(0, dtype=torch.float32)
        samples = part(len(places), dtype=torch.bfloat16)
        return cls((codes, scales, groups, samples), (rows, columns), weight.dtype, tuple(places))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it is made of."""
        return self.codes, self.scales, self.groups, self.samples

    @property
    def storage_bytes(self) -> int:
        """Return the bytes of its parts."""
        return sum(part.nbytes for part in self.parts)

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return what the codes stand for, [out, in], in its own dtype or another."""
        rows, columns = self.shape
        values: torch.Tensor = _values(
            self.codes, self.scales, self.groups, self.codes, rows, columns, dtype or self.dtype
        )
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.codes.dtype}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(_PARTS), (tuple(self.shape), self.dtype, self.places)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> QuantisedWeight:
        return QuantisedWeight([parts[name] for name in _PARTS], *context)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph depends on."""
        return repr((self, self.places))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and len(args) > 1 and isinstance(args[1], QuantisedWeight):
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        aten = torch.ops.aten
        whole = func is aten.view.default and tuple(args[1]) == tuple(first.shape)  # of DTensor.to_local()
        if whole or func in (aten.detach.default, aten.alias.default):
            made = first._with(aten.detach.default)
            return return_and_correct_aliasing(func, args, kwargs, made)  # type: ignore[no-untyped-call]
        if func is aten.empty_like.default:
            return first._with(lambda part: torch.empty_like(part, device=kwargs.get("device")))
        if func is aten.copy_.default and isinstance(first, QuantisedWeight):
            if not isinstance(args[1], QuantisedWeight):
                return first._quantise(args[1])
            for target, part in zip(first.parts, args[1].parts, strict=True):
                target.copy_(part)
            return first
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if isinstance(first, QuantisedWeight) and func._schema.is_mutable:
            return first._quantise(result)
        return result

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedWeight:
        return QuantisedWeight([change(part) for part in self.parts], (*self.shape,), self.dtype, self.places)

    def _quantise(self, weight: torch.Tensor) -> Self:
        """Fill the parts from ``weight`` [out, in]."""
        whole = weight.detach().to(self.device, self.dtype).expand(self.shape).contiguous()
        if self.codes.dtype == torch.int8:  # the library's kernel for GPUs reads float16
            codes, scales, _ = load_library().int8_vectorwise_quant(whole.half())
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        else:  # as peft and transformers do: in parts, since on a host the library needs 20 bytes per element meanwhile
            library, magnitudes = load_library(), torch.empty_like(self.scales, dtype=torch.float32)
            split = (whole.view(-1), _AT_ONCE), (self.codes, _AT_ONCE // 2), (magnitudes, _AT_ONCE // _BLOCK)
            for part, codes, target in zip(*(torch.split(tensor, size) for tensor, size in split), strict=True):
                made = torch.ops.bitsandbytes.quantize_4bit.default(part, _BLOCK, "nf4", torch.uint8)
                codes.copy_(made[0].view(-1))
                target.copy_(made[1])
            mean = magnitudes.mean()
            scales, state = library.quantize_blockwise(magnitudes - mean, blocksize=_GROUP)
            self.scales.copy_(scales)
            self.groups[0] = mean
            self.groups[1:] = state.absmax
        if self.places:
            self.samples.copy_(whole.view(-1)[list(self.places)])
        return self


def requantised(weight: torch.Tensor, form: QuantisedWeight) -> torch.Tensor:
    """Return ``weight`` [out, in] as products read it once it is quantised as ``form``, which may be without memory."""
    quantised: QuantisedWeight = torch.empty_like(form, device=weight.device)  # type: ignore[assignment]
    quantised.copy_(weight)
    return quantised.dequantised()


def _plain(value: Any) -> Any:
    return value.dequantised() if isinstance(value, QuantisedWeight) else value


def _linear(hidden: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows, columns = weight.shape
    hidden = hidden.to(compute_dtype(hidden))
    product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        hidden, weight.codes, weight.scales, weight.groups, rows, columns
    )
    return product if bias is None else product + bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """A product that has the values of its weight only while it computes with them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        groups: torch.Tensor,
        rows: int,
        columns: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales, groups)
        ctx.shape = rows, columns
        return functional.linear(hidden, _values(codes, scales, groups, hidden, rows, columns, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        values = _values(*ctx.saved_tensors, gradient, *ctx.shape, gradient.dtype)
        return gradient @ values, None, None, None, None, None


@torch.library.custom_op("nxdt::dequantised", mutates_args=())
def _values(
    codes: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    reader: torch.Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The values [rows, columns] of a weight.

    ``reader`` is not read. It is what the values are multiplied with, which differs in backward. Otherwise the compiler
    would join the calls of forward and backward, and keep the values in between.
    """
    values: torch.Tensor
    if codes.dtype == torch.int8:
        values = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(codes, scales).to(dtype)
        return values
    blockwise, four_bits = torch.ops.bitsandbytes.dequantize_blockwise, torch.ops.bitsandbytes.dequantize_4bit
    magnitudes = blockwise.default(scales, groups[1:], _map(scales.device), _GROUP, torch.float32)
    magnitudes += groups[0]
    # The kernel for CPUs begins a block with each row, and takes no odd number: it gets the blocks in one row.
    values = four_bits.default(codes.view(-1, 1), magnitudes, _BLOCK, "nf4", (2 * codes.numel(),), dtype)
    return values.view(-1)[: rows * columns].view(rows, columns)


@_values.register_fake
def _(
    codes: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    reader: torch.Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return codes.new_empty(rows, columns, dtype=dtype)


@cache
def _map(device: torch.device) -> torch.Tensor:
    """Return the numbers of the 8-bit codes of magnitudes."""
    table: torch.Tensor = load_library().create_dynamic_map().to(device)
    return table


@cache
def load_library() -> Any:
    """Import bitsandbytes, which defines its operators.

    Raises:
        QuantisationLibraryMissing: it cannot be imported.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # lacks kernels for inference on hosts
    try:
        import bitsandbytes.functional as library
    except ImportError as error:
        raise QuantisationLibraryMissing(reason=str(error)) from error
    return library
