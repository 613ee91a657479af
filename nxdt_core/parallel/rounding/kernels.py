"""One kernel for each parameter: element-wise functions over a parameter's block, compiled or operation by operation.

Both ways are the same function, and on a host they give the same bits (no compiler setting there merges a product and
a sum), so that what is too small to be worth compiling need not be.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxdt_core.devices import profile_of
from nxdt_core.nn.random.positions import rows_of
from nxdt_core.nn.random.rounding import element_numbers
from nxdt_core.protocols.optimizer import ParameterShard

__all__ = ["SMALL_ELEMENTS", "BlockKernel", "Numbers", "apart", "can_compile"]

SMALL_ELEMENTS = 2**23
"""On a host, runs of fewer elements are not compiled: forward and backward in bfloat16 take many times as long there as
the update does without a compiler, and compiling takes seconds."""

_PIECE_COMPILED = 2**30
"""Elements of a kernel's call: 32-bit numbers count them."""
_PIECE_ON_HOST = 2**16
"""Without a compiler: temporary tensors stay in a core's cache."""
_PIECE = 2**24
"""Without a compiler, elsewhere: each piece costs launches, and some temporary tensors of 64 MiB."""

_log = logging.getLogger(__name__)

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of consecutive elements of a block in the whole parameter, as arguments of a kernel."""

    first: torch.Tensor
    """int32 scalar on the device."""
    skipped: int
    columns: int
    gap: int

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Return one for each of ``elements``; see :func:`nxdt_core.nn.random.rounding.element_numbers`."""
        return element_numbers(self.first, elements.numel(), skipped=self.skipped, columns=self.columns, gap=self.gap)


def apart(table: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a small table as tensors with memory of their own, copied together.

    Compiled code would depend on where a row starts in its table, and on an equal size of a row and a parameter.
    """
    rows = [torch.empty(table.shape[1:], dtype=table.dtype, device=table.device) for _ in table]
    torch._foreach_copy_(rows, list(table.unbind()))
    for row in rows:
        torch._dynamo.mark_static(row)
    return rows


class BlockKernel:
    """An element-wise function ``function(*tensors, numbers, *others)``, which writes its results into its tensors."""

    def __init__(self, function: Function, *, compiled: bool) -> None:
        """``compiled``: by the device's compiler, where :func:`can_compile` found one."""
        self._function = function
        self._compiled = compiled

    @torch.no_grad()
    def __call__(self, place: ParameterShard, tensors: Sequence[torch.Tensor], *others: Any) -> None:
        """Run the kernel over one rank's shard, in place.

        Args:
            place: of the shard; zeros that fill up a padded one get numbers that are not used.
            tensors: of the shard's shape, all on one device; the function gets them flat.
            others: what all elements share; tensors are rows of :func:`apart`, or scalars.
        """
        shard = tensors[0]
        if not shard.numel():
            return
        flat = [_plain(tensor.reshape(-1)) for tensor in tensors]
        function, limit = self._on(shard.device)
        parts = _first_numbers(place.shape, place.box.offsets, tuple(shard.shape), shard.device)
        elements = shard.numel() // len(parts)
        for number, (first, columns, gap) in enumerate(parts):
            for skipped in range(0, elements, limit):
                start, count = number * elements + skipped, min(limit, elements - skipped)
                pieces = flat if count == shard.numel() else [_plain(each[start : start + count]) for each in flat]
                function(*pieces, Numbers(first, skipped, columns, gap), *others)
        for tensor, each in zip(tensors, flat, strict=True):
            if each.data_ptr() != tensor.data_ptr():  # a copy, since the tensor is not contiguous
                tensor.copy_(each.view(tensor.shape))

    def _on(self, device: torch.device) -> tuple[Function, int]:
        profile = profile_of(device)
        if self._compiled:
            return _compiled(self._function, profile.compile_backend), _PIECE_COMPILED
        return self._function, _PIECE_ON_HOST if profile.cache_bound_kernels else _PIECE


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether this machine can compile for ``device``, by compiling a small function. Warns once if not."""
    profile = profile_of(device)
    if profile.static_shapes:
        return False
    try:
        _compiled(_probe, profile.compile_backend)(torch.zeros(2, device=device))
    except Exception as error:  # whatever a missing or broken tool chain raises
        _log.warning(
            "Stochastic rounding runs operation by operation on this machine's %s, which takes longer: torch.compile "
            "failed with %s: %s. Install a C++ compiler, and Triton for GPUs.",
            device.type,
            type(error).__name__,
            next(iter(str(error).strip().splitlines()), ""),
        )
        return False
    return True


@functools.cache
def _compiled(function: Function, backend: str) -> Function:
    """Sizes are arguments of the kernel: one serves the parameters of any size."""
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def _probe(values: torch.Tensor) -> None:
    values.add_(1)


def _plain(view: torch.Tensor) -> torch.Tensor:
    """The same memory without the record of what it is a view of, on whose shape compiled code would depend."""
    return view.data


@functools.lru_cache(maxsize=4096)
def _first_numbers(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> list[tuple[torch.Tensor, int, int]]:
    """First number, columns and gap of each part of a block. Kept from step to step; layers share theirs."""
    return [
        (
            torch.tensor(_int32(rows.first), dtype=torch.int32, device=device),
            rows.columns if rows.count > 1 else 0,
            _int32(rows.gap),
        )
        for rows in rows_of(shape, offsets, sizes)
    ]


def _int32(number: int) -> int:
    """The int32 that is equal modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31
