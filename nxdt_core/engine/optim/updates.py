"""Updates of weights by separate kernels, and stochastic rounding: of updates where there are no masters, else of the
copies of masters.

Which way an element is rounded is a function of (seed, step, global parameter name, global element) alone: the same on
every replica and in every layout, and there is no state to save.

Kernels are element-wise functions over a parameter's block, compiled or operation by operation. On a host all ways give
the same bits (no compiler setting there merges a product and a sum), so that what is too small to be worth compiling
need not be. The step of torch's Adam and AdamW is one kernel for each parameter, for weights of any precision: torch's
fused kernels write clipped gradients back, and round only to the nearest.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.compile import one_graph
from nxdt_core.engine.optim.state import eager
from nxdt_core.models.random.init import Rows, rows_of
from nxdt_core.models.random.rounding import element_numbers, hashed, noises, rounded, rounded_number, rounding_key
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


BUCKET_ELEMENTS = 2**25
"""Elements of whole parameters whose weights and gradients exist in float32 at a time: 256 MiB of both."""
_OTHER_UPDATES = ("amsgrad", "maximize", "differentiable")
"""Options of torch's that change the arithmetic; the configuration has none of them."""


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
    """Return how a policy rounds what the optimizer makes of the weights; None where it has masters, which are rounded
    to what is computed with, or rounds to nearest."""
    if not policy.stochastic_rounding or policy.master_weights:
        return None
    return StochasticRounding(seed=seed, state="bfloat16" if policy.optimizer_state == "bfloat16" else "float32")


def by_vectors(elements: torch.Tensor) -> None:
    """Let code that is compiled for any size differ where 16 divides it: Triton then loads several elements at once."""
    if elements.numel() % 16:
        pass


@dataclass(frozen=True, slots=True)
class Numbers:
    """Indices of consecutive elements of a block in the whole parameter, as arguments of a kernel.

    See :func:`nxdt_core.models.random.rounding.element_numbers`.
    """

    first: torch.Tensor
    columns: torch.Tensor | None = None
    gap: torch.Tensor | None = None

    def hashed(self, elements: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return :func:`nxdt_core.models.random.rounding.hashed` of the elements of a flat tensor."""
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
        for rows in _rows(place.shape, place.region.offsets, tuple(shard.shape)):
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


class StochasticUpdates:
    """Updates weights that are rounded by an optimizer that sees float32.

    The optimizer works on float32 :func:`stand_ins` of the weights, some parameters at a time: it is called once per
    bucket, and leaves parameters without a gradient alone. Buckets are made of the sizes of whole parameters, so that
    ranks that share them have the same ones.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        trained: Mapping[str, nn.Parameter],
        rounding: StochasticRounding,
        *,
        backend: Backend,
    ) -> None:
        """See :class:`nxdt_core.engine.optim.updates.AdamUpdates`; ``trained`` are stand-ins."""
        self._optimizer, self._weights, self._places, self._stand_ins = optimizer, weights, places, trained
        self._rounding = rounding
        self._backend: Backend = backend
        self._kernel = BlockKernel(round_into, backend=backend)

    def apply(self, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run."""
        sizes = {name: math.prod(self._places[name].shape) for name, w in self._weights.items() if w.grad is not None}
        for bucket in buckets(sizes, sizes.__getitem__, BUCKET_ELEMENTS):
            for name in bucket:
                weight, stand_in = self._weights[name], self._stand_ins[name]
                assert weight.grad is not None
                stand_in.data, stand_in.grad = weight.detach().float(), weight.grad.float()
                state = self._optimizer.state[stand_in]
                for leaf in self._low_precision_state(name, torch.bfloat16):
                    state[leaf] = state[leaf].float()
            self._optimizer.step()
            results = []
            for name in bucket:
                state = self._optimizer.state[self._stand_ins[name]]
                for leaf in self._low_precision_state(name, torch.float32):
                    target = torch.zeros_like(state[leaf], dtype=torch.bfloat16)
                    results.append((name, f"{name}/{leaf}", target, state[leaf]))
                    state[leaf] = target
                results.append((name, name, self._weights[name].detach(), self._stand_ins[name].data))
            keys = self._rounding.keys(step, [key for _, key, _, _ in results], results[0][2].device)
            for (name, _, target, values), key in zip(results, separate_rows(keys, self._backend), strict=True):
                self._kernel(self._places[name], (target, values), key)
            for name in bucket:
                stand_in = self._stand_ins[name]
                stand_in.data, stand_in.grad = _stand_in(self._weights[name]), None
            del results, state, target, values  # before the next bucket has float32 weights

    def _low_precision_state(self, name: str, dtype: torch.dtype) -> list[str]:
        """Return the names of the state that is kept in bfloat16 and has ``dtype`` now."""
        if self._rounding.state == "float32":
            return []
        stand_in = self._stand_ins[name]
        return [
            leaf
            for leaf, value in self._optimizer.state[stand_in].items()
            if isinstance(value, torch.Tensor)
            and value.dtype == dtype
            and value.dim()
            and value.shape == stand_in.shape
        ]


def stand_ins(weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Return float32 parameters to build an optimizer over, which have memory while it works on them."""
    return {name: nn.Parameter(_stand_in(weight)) for name, weight in weights.items()}


def round_into(target: torch.Tensor, values: torch.Tensor, numbers: Numbers, key: torch.Tensor) -> None:
    """Round float32 ``values`` into ``target``; a function for :class:`BlockKernel`."""
    target.copy_(rounded(values, *noises(numbers.hashed(values, key), 1)))


def _stand_in(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor of the weight's shape with the memory of one number."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)


class AdamUpdates:
    """The step of torch's ``Adam`` or ``AdamW`` in one kernel for each parameter, with the same arithmetic in float32.

    Every kernel reads weights, gradients and state and writes weights and state: 28 bytes for each element in float32,
    22 where weights and gradients are bfloat16, 14 where the state is bfloat16 too. What all parameters share (steps,
    rates, keys) takes some kernels over one number for each parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        trained: Mapping[str, torch.nn.Parameter],
        rounding: StochasticRounding | None = None,
        *,
        backend: Backend,
    ) -> None:
        """Update the parameters of ``optimizer``.

        Args:
            optimizer: keeps state and hyperparameters; its ``step`` is not called.
            weights: this rank's shards by global name.
            places: where each is in its whole.
            trained: what the optimizer was built over, the keys of its state.
            rounding: of bfloat16; None rounds to the nearest, and keeps state in the dtype of the weights as torch's.
            backend: as for :class:`BlockKernel`.
        """
        self._optimizer, self._weights, self._places, self._trained = optimizer, weights, places, trained
        self._rounding = rounding
        self._backend: Backend = backend
        self._dtype: torch.dtype | None = None if rounding is None else getattr(torch, rounding.state)
        self._kernels = {
            decoupled: BlockKernel(kernel, backend=backend)
            for decoupled, kernel in ((True, _decoupled), (False, _coupled))
        }
        names = {parameter: name for name, parameter in trained.items()}
        self._groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}

    @staticmethod
    def handles(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` is torch's own Adam or AdamW, of which nothing is overridden, below float64."""
        kinds = (torch.optim.Adam, torch.optim.AdamW)
        return type(optimizer) in (*kinds, *map(eager, kinds)) and not any(
            any(map(group.get, _OTHER_UPDATES)) or any(p.dtype == torch.float64 for p in group["params"])
            for group in optimizer.param_groups
        )

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run.

        As under torch's fused kernels, weights and state stay as they are where a tensor ``found_inf`` of the optimizer
        is not 0, and gradients are divided by its tensor ``grad_scale``, if it has one.
        """
        gradients = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        if not gradients:
            return
        names, device = list(gradients), next(iter(gradients.values())).device
        states = [self._state(name) for name in names]
        rejected: torch.Tensor | None = getattr(self._optimizer, "found_inf", None)
        taken = 1.0 if rejected is None else 1.0 - rejected
        factors = self._factors(names, torch.stack([state["step"] for state in states]).double() + taken)
        keys: Sequence[torch.Tensor | None] = [None] * len(names)
        if self._rounding is not None:
            keys = separate_rows(self._rounding.keys(step, names, device), self._backend)
        shared = separate_rows(factors, self._backend)
        for name, state, key, factor in zip(names, states, keys, shared, strict=True):
            weight = self._weights[name].detach()
            tensors = (weight, gradients[name], state["exp_avg"], state["exp_avg_sq"])
            kernel = self._kernels[self._groups[name]["decoupled_weight_decay"]]
            kernel(self._places[name], tensors, key, factor, rejected)
        # alpha chooses the overload that takes a tensor: the other would wait for the device to read its number.
        count = torch.as_tensor(taken, dtype=torch.float32, device=device)
        torch._foreach_add_([state["step"] for state in states], count, alpha=1.0)

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """Return torch's state in the run's dtype, on the device of the weight; a loaded one may be elsewhere."""
        weight = self._weights[name]
        dtype = self._dtype or weight.dtype
        state: dict[str, torch.Tensor] = self._optimizer.state[self._trained[name]]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=dtype)
        state["step"] = state["step"].to(weight.device)
        for leaf in ("exp_avg", "exp_avg_sq"):
            state[leaf] = state[leaf].to(dtype)
        return state

    def _factors(self, names: Sequence[str], steps: torch.Tensor) -> torch.Tensor:
        """Return the factors of each parameter's update, float32 [names, 9], computed in float64."""
        rows = []
        for group in map(self._groups.__getitem__, names):
            numbers = (
                group["lr"],
                group["weight_decay"],
                *group["betas"],
                group["eps"],
                1.0,
            )  # 1: gradients as they are
            rows.append([float(number) for number in numbers])
        hyperparameters = torch.tensor(rows, dtype=torch.float64)
        lr, decay, beta1, beta2, eps, scale = hyperparameters.to(steps.device, non_blocking=True).unbind(1)
        rate = lr / (1 - beta1**steps)
        root = (1 - beta2**steps).rsqrt()
        decoupled = 1 - lr * decay
        divisor: torch.Tensor | None = getattr(self._optimizer, "grad_scale", None)
        scale = scale if divisor is None else scale / divisor
        return torch.stack([1 - beta1, beta2, 1 - beta2, decay, decoupled, root, eps, rate, scale], dim=1).float()


def _decoupled(weight: torch.Tensor, grad: torch.Tensor, *rest: Any) -> None:
    """Update as AdamW: the decay is taken from the weight."""
    factors = rest[4]
    value = weight.float()
    _update(weight, value, value * factors[4], grad.float() * factors[8], *rest)


def _coupled(weight: torch.Tensor, grad: torch.Tensor, *rest: Any) -> None:
    """Update as Adam: the decay is a part of the gradient."""
    factors = rest[4]
    value = weight.float()
    _update(weight, value, value, grad.float() * factors[8] + value * factors[3], *rest)


def _update(
    weight: torch.Tensor,
    value: torch.Tensor,
    decayed: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    numbers: Numbers,
    key: torch.Tensor | None,
    factors: torch.Tensor,
    rejected: torch.Tensor | None,
) -> None:
    """Write the new ``weight``, ``mean`` and ``square``, all flat; see :meth:`AdamUpdates._factors`."""
    by_vectors(weight)
    old = (value, mean.float(), square.float())
    new_mean = (grad - old[1]).mul_(factors[0]).add_(old[1])
    new_square = (old[2] * factors[1]).add_((grad * grad).mul_(factors[2]))
    change = (new_mean / _root(new_square).mul_(factors[5]).add_(factors[6])).mul_(factors[7])
    new = (decayed - change, new_mean, new_square)
    if key is not None:  # one hash for all three; a NaN of the state makes one of the weight
        bits = torch.where(new[0] == new[0], numbers.hashed(weight, key), 0)
        drawn = noises(bits, 3 if mean.dtype == torch.bfloat16 else 1)
    for number, (target, before, after) in enumerate(zip((weight, mean, square), old, new, strict=True)):
        written = after
        if key is not None and target.dtype == torch.bfloat16:
            written = rounded_number(after, drawn[number])
        if rejected is not None:
            written = torch.where(rejected != 0, before, written)
        target.copy_(written)


def _root(square: torch.Tensor) -> torch.Tensor:
    """Return square roots that are right to the last bit on a host, as those of compiled code.

    Torch's own are MKL's there, of which one in five is not. NumPy uses the processor's instruction.
    """
    if torch.compiler.is_compiling() or not profile_of(square.device).host:
        return square.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(square.numpy()))
