"""An accelerator's kernels, autocast and compiled layers on the meta device, as far as they decide what backward keeps.

The meta device composes attention and RMSNorm of small operations, which keep scores of seq x seq and several copies of
the activations; every accelerator has one kernel for each, which keeps its inputs, its output and one number a row.
It has no autocast either.

Inductor cuts a layer's graph where the fewest bytes cross from forward to backward. It computes cheap operations again,
unless their result is the input of a matrix product: backward would have to write that to memory again. A product that
casts its inputs to one byte writes them anyhow, so that they are computed again. Measured on the graphs of the models
here, which ``tests/engine/estimate/test_estimate_compiled.py`` repeats, and for float8 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nxdt_core.distributed.devices import HOST
from nxdt_core.engine.discarded import cast_discarded
from nxdt_core.engine.recompute import apply_recompute, is_recomputed, parts_of_recomputed, routes_tokens
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.plan import ParallelPlan


class AcceleratorKernels(TorchFunctionMode):
    """Within the block, calls of ``torch`` behave in shapes, dtypes and saved tensors as on an accelerator."""

    def __init__(self, autocast: torch.dtype | None = None, views: Iterable[torch.Tensor] = ()) -> None:
        """
        Args:
            autocast: dtype of matrix products; None for that of their inputs.
            views: parameters that stand for views of others. Autocast keeps its copies of weights for as long as its
                block lasts, of views it makes a new one each time.
        """
        super().__init__()
        self._autocast = autocast
        self._views = {id(tensor) for tensor in views}
        self._casts: dict[int, torch.Tensor] | None = {}
        self._planned = torch.autocast(HOST.type, dtype=autocast, enabled=autocast is not None)

    def __enter__(self) -> Any:
        """Enter the block."""
        self._planned.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """Leave the block."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._planned.__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` or its replacement."""
        kwargs = kwargs or {}
        if self._autocast is not None and func in _CAST:
            args = tuple(self._cast(value) for value in args)
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return _REPLACED.get(func, func)(*args, **kwargs)

    def end_forward(self) -> None:
        """Forget the copies of weights that autocast keeps until the end of forward's block; a recomputed part keeps
        only its own."""
        self._casts = None

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if self._casts is None or not (value.is_leaf and value.requires_grad) or id(value) in self._views:
            return value.to(self._autocast)
        if id(value) not in self._casts:  # leaves outlive the block
            self._casts[id(value)] = value.to(self._autocast)
        return self._casts[id(value)]


class _Attention(torch.autograd.Function):
    """Keeps what flash attention keeps (Dao et al. 2022, arXiv:2205.14135): inputs, output, a log-sum-exp per row."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        # Heads are adjacent in memory, so that joining them again needs no copy.
        *batch, heads, rows, _ = query.shape
        output = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-3, -2)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        scale = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        dtype = hidden.dtype if weight is None else torch.promote_types(hidden.dtype, weight.dtype)
        return torch.empty_like(hidden, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)


class _CastingProduct(torch.autograd.Function):
    """Shapes of a :class:`~nxdt_core.protocols.precision.LinearProduct` in a compiled layer; keeps no inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.given = hidden.shape, hidden.dtype
        return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype(hidden))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,), (shape, dtype) = ctx.saved_tensors, ctx.given
        return grad.new_empty(shape, dtype=dtype), torch.empty_like(weight)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> Any:
    return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _rms_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(hidden, weight)  # type: ignore[no-untyped-call]


def _dropout(hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """The fused kernel keeps a mask of one byte per element, the composition one of the input's dtype."""
    return torch.native_dropout(hidden, p, training)[0] if training and p else hidden


_REPLACED: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.dropout: _dropout,
}

_CAST = {
    functional.scaled_dot_product_attention,
    functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    functional.conv1d,
}
"""Operators of language models that autocast runs in its dtype."""


def keep_as_compiled(module: nn.Module, plan: ParallelPlan, *, gathers_again: bool) -> None:
    """Let the layers of ``module`` save for backward about what they save when they are compiled.

    Activation functions keep their inputs and their result, and so do norms that are not one operation. The
    matrices of a tensor block share one copy of their input in autocast's dtype. If inputs are gathered again, they
    are made of the norms' inputs.

    Args:
        module: one pipeline stage on the meta device, recomputation applied, layers as they are written.
        plan: says what a layer is, and which of its modules are cheap.
        gathers_again: whether tensor blocks gather again what they read.
    """
    recomputed = set(parts_of_recomputed(module))
    functions, norms = [], []
    for path, part in _in_layers(module, plan):
        if is_recomputed(part):
            continue
        if getattr(part, "product", functional.linear) is not functional.linear:
            part.product = _CastingProduct.apply  # type: ignore[assignment]
        if matches_any(plan.cheap, path):
            has_parameters = any(True for _ in part.parameters())
            if not has_parameters:
                functions.append(path)
            elif gathers_again and part not in recomputed:
                norms.append(path)
        elif any(matches(pattern.rpartition(".")[0], path) for pattern in plan.norms):
            functions.append(path)
        if matches_any(plan.tensor_blocks, path) and not routes_tokens(path, part, plan):
            part.register_forward_pre_hook(_cast)
    again = replace(plan, recompute={"again": (*functions, *norms)}, cheap=tuple(norms))
    apply_recompute(module, again, granularity="selective", names=("again",))


def _in_layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in [*module.named_modules()]:
        if matches(plan.recompute_layer, path):
            yield from ((f"{path}.{name}", part) for name, part in [*layer.named_modules()] if name)


def _cast(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args or not isinstance(args[0], torch.Tensor):
        return args
    return cast_discarded(block, args[0], compute_dtype(args[0])), *args[1:]
