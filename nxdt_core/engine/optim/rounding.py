"""Stochastic rounding of weights, of updates where there are no masters, else of the copies of masters; and kernels.

Which way an element is rounded is a function of (seed, step, global parameter name, global element) alone: the same on
every replica and in every layout, and there is no state to save.

Kernels are element-wise functions over a parameter's block, compiled or operation by operation. On a host all ways give
the same bits (no compiler setting there merges a product and a sum), so that what is too small to be worth compiling
need not be.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.compile import one_graph
from nxdt_core.models.random.positions import Rows, element_numbers, hashed, rounding_key, rows_of
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.precision import PrecisionPolicy

Backend = Literal["eager", "compile"]
"""Way to run a kernel: torch operation by operation, or ``torch.compile``."""
_PIECE_COMPILED = 2**30
"""Elements of a kernel's call: 32-bit numbers count them."""
_PIECE_ON_HOST = 2**16
"""Elements per piece without a compiler: temporary tensors stay in a core's cache."""
_PIECE = 2**24
"""Elements per piece elsewhere: each costs launches, and some temporary tensors of 64 MiB."""
_log = logging.getLogger(__name__)
Function = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticRounding:
    """The seed of stochastic rounding, and the dtype of the optimizer's state."""

    seed: int
    state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's state between steps."""

    def keys(self, step: int, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """Return the keys of tensors in one step, int32 [names, KEY_WORDS], in one copy to the device."""
        words = [rounding_key(self.seed, f"rounding\0{step}\0{name}") for name in names]
        return torch.tensor(words, dtype=torch.int32, device=HOST).to(device, non_blocking=True)


def updates_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """Return how a policy rounds what the optimizer makes of the weights; None where it has masters, or rounds to
    nearest."""
    if not policy.stochastic_rounding or policy.master_weights:
        return None
    return StochasticRounding(seed=seed, state="bfloat16" if policy.optimizer_state == "bfloat16" else "float32")


def masters_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """Return how a policy rounds masters to what is computed with; None where it rounds to nearest, or has none."""
    return StochasticRounding(seed=seed) if policy.stochastic_rounding and policy.master_weights else None


def by_vectors(elements: torch.Tensor) -> None:
    """Let code that is compiled for any size differ where 16 divides it: Triton then loads several elements at once."""
    if elements.numel() % 16:
        pass


@dataclass(frozen=True, slots=True)
class Numbers:
    """Indices of consecutive elements of a block in the whole parameter, as arguments of a kernel.

    See :func:`nxdt_core.models.random.positions.element_numbers`.
    """

    first: torch.Tensor
    columns: torch.Tensor | None = None
    gap: torch.Tensor | None = None

    def hashed(self, elements: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return :func:`nxdt_core.models.random.positions.hashed` of the elements of a flat tensor."""
        by_vectors(elements)
        numbers = element_numbers(elements.numel(), elements.device, self.columns, self.gap)
        # The first number is a part of the offset, which is computed once, not once for each element.
        return hashed(numbers, (key[0], self.first * key[0] + key[1], key[2]))


def separate_rows(table: torch.Tensor, backend: Backend) -> list[torch.Tensor]:
    """Return the rows of a small table in the form that kernels of ``backend`` take.

    For ``torch.compile``, each row has separate memory, and all are copied together. Compiled code would otherwise
    depend on where a row starts in its table, and on whether a row and a parameter have equal sizes.
    """
    if backend != "compile":
        return list(table.unbind())
    rows = [torch.empty(table.shape[1:], dtype=table.dtype, device=table.device) for _ in table]
    torch._foreach_copy_(rows, list(table.unbind()))
    for row in rows:
        torch._dynamo.mark_static(row)
    return rows


class BlockKernel:
    """An element-wise function ``function(*tensors, numbers, *others)``, which writes its results into its tensors."""

    def __init__(self, function: Function, *, backend: Backend = "eager") -> None:
        """``backend``: see :func:`backend_on`."""
        self._function = function
        self._backend = backend

    @torch.no_grad()
    def __call__(self, place: ParameterShard, tensors: Sequence[torch.Tensor], *others: Any) -> None:
        """Run the kernel over one rank's shard, in place.

        Args:
            place: of the shard; zeros that fill up a padded one get numbers that are not used.
            tensors: of the shard's shape, all on one device; the function gets them flat.
            others: what all elements share; tensors are rows of :func:`separate_rows`, or scalars.
        """
        shard = tensors[0]
        if not shard.numel():
            return
        # Without a base, on which compiled code would depend.
        flat = [tensor.reshape(-1).data for tensor in tensors]
        device, end = shard.device, 0
        function, limit = self._function, _PIECE_ON_HOST if profile_of(device).cache_bound_kernels else _PIECE
        if self._backend == "compile":
            function, limit = _compiled(function, profile_of(device).compile_backend), _PIECE_COMPILED
        for rows in _rows(place.shape, place.box.offsets, tuple(shard.shape)):
            for piece in rows.pieces(limit):
                start, end = end, end + piece.elements
                whole = piece.elements == shard.numel()
                elements = flat if whole else [tensor[start:end].data for tensor in flat]
                function(*elements, _numbers(piece, device), *others)
        for tensor, flat_tensor in zip(tensors, flat, strict=True):
            if flat_tensor.data_ptr() != tensor.data_ptr():  # a copy, since the tensor is not contiguous
                tensor.copy_(flat_tensor.view(tensor.shape))


def backend_on(device: torch.device) -> Backend:
    """Return what runs the kernels of one rank. A host compiles none: that takes longer than many updates."""
    return "compile" if not profile_of(device).host and can_compile(device) else "eager"


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether this machine can compile for ``device``, by compiling a small function. Warns once if not."""
    profile = profile_of(device)
    if profile.static_shapes:
        return False
    try:
        _compiled(_probe, profile.compile_backend)(torch.zeros(2, device=device))
    except Exception as error:  # any error of a missing or broken toolchain
        _log.warning(
            "Updates of weights are not compiled on this machine's %s, and stochastic rounding runs operation by "
            "operation, which takes longer: torch.compile failed with %s: %s. Install a C++ compiler, and Triton for "
            "GPUs.",
            device.type,
            type(error).__name__,
            next(iter(str(error).strip().splitlines()), ""),
        )
        return False
    return True


@functools.cache
def _compiled(function: Function, backend: str) -> Function:
    """Return the compiled function. Sizes are arguments of it: one serves parameters of any size."""
    return one_graph(function, dynamic=True, backend=backend)


def _probe(values: torch.Tensor) -> None:
    values.add_(1)


@functools.lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Rows]:
    return rows_of(shape, offsets, sizes)


@functools.lru_cache(maxsize=4096)
def _numbers(rows: Rows, device: torch.device) -> Numbers:
    """Return the indices of ``rows``, kept from step to step and shared by layers; each has separate memory, as in
    :func:`separate_rows`."""
    values = (rows.first, rows.columns, rows.gap) if rows.count > 1 else (rows.first,)
    int32s = ((value + 2**31) % 2**32 - 2**31 for value in values)  # equal modulo 2³²
    return Numbers(*(torch.tensor(value, dtype=torch.int32, device=device) for value in int32s))
