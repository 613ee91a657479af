"""Tensors that are discarded after forward and computed again in backward, while their inputs are kept.

Activation recomputation (:mod:`nxdt_core.engine.recompute`) discards what a module computes inside; its output is kept
by the next operation. Here the output is discarded too: autograd keeps a recipe in its place. No matrix product runs
twice. (Megatron-LM's ``recompute_modules``.)

The input of a tensor block is one such tensor: this rank's part of the sequence is kept, and gathered again in backward
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). One gather serves all matrices of a block. It begins when
the gradient of the block's last product is known, so that it overlaps with the backward of the rest of the block.

This is for layers as they are written. A compiled layer tags in its graph what is computed again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nxdt_core.distributed.collectives import PendingGather, gather_along


class Recipe:
    """Computes one discarded tensor again, once for all operations that need it in backward."""

    def __init__(self) -> None:
        self._uses = 0
        self._value: torch.Tensor | None = None
        self._autocast: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def wanted(self) -> bool:
        """Return whether something will still ask for the tensor."""
        return self._uses > 0

    def use(self) -> None:
        """Count one more operation that will ask for the tensor."""
        self._uses += 1

    def take(self) -> torch.Tensor:
        """Return the tensor, which is dropped again when the last user has taken it."""
        value = self._value
        if value is None:
            with torch.no_grad(), self._autocast():
                value = self.make()
        self._uses -= 1
        self._value = value if self._uses > 0 else None
        return value

    def make(self) -> torch.Tensor:
        """Return the tensor as it was in forward, in the same layout."""
        raise NotImplementedError

    def remember_autocast(self, tensor: torch.Tensor) -> None:
        """Let :meth:`make` run in the current autocast state, which backward does not have."""
        if tensor.is_meta:
            return
        kind = tensor.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._autocast = functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class DiscardedTensors:
    """The discarded tensors of a layer while it runs, by storage: views of one are discarded with it."""

    def __init__(self) -> None:
        self.runs = False
        """True while the layer runs forward and autograd will run backward through it."""
        self.block: weakref.ref[Recipe] | None = None
        """The input of the tensor block that runs, where it is made again in backward."""
        self._found: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Recipe, torch.dtype, int]]
        self._found = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[DiscardedTensors], tuple[()]]:
        """Return how to copy or unpickle it: empty, as it is between forward passes."""
        return DiscardedTensors, ()

    def add(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Discard ``tensor``, a new one, after forward."""
        recipe.remember_autocast(tensor)
        self._found[tensor.untyped_storage()] = (recipe, tensor.dtype, tensor._version)

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """Return the recipe of ``tensor``; None if it is kept, is a view or was changed in place."""
        entry = self._found.get(tensor.untyped_storage())
        if entry is None or entry[1] != tensor.dtype or entry[2] != tensor._version or tensor._is_view():
            return None
        return entry[0]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Let autograd save recipes instead of discarded tensors within the block, the layer's forward."""
        self.runs = True
        try:
            with saved_tensors_hooks(self._pack, _unpacked):
                yield
        finally:
            self.runs = False
            self._found.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedRecipe:
        if type(tensor) is not torch.Tensor:
            return tensor
        entry = self._found.get(tensor.untyped_storage())
        if entry is None or entry[1] != tensor.dtype or entry[2] != tensor._version:
            # A result that its own node keeps would keep the node.
            return tensor if tensor.grad_fn is None else tensor.detach()
        return _SavedRecipe(entry[0], tensor)


class _SavedRecipe:
    """Replaces a discarded tensor, or a view of one, among the tensors that autograd saves."""

    __slots__ = ("_offset", "_recipe", "_size", "_stride")

    def __init__(self, recipe: Recipe, tensor: torch.Tensor) -> None:
        recipe.use()
        self._recipe = recipe
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        return self._recipe.take().as_strided(self._size, self._stride, self._offset)


def _unpacked(packed: torch.Tensor | _SavedRecipe) -> torch.Tensor:
    return packed.tensor() if isinstance(packed, _SavedRecipe) else packed


def wrap_forward(module: nn.Module, forward: Callable[..., Any], *, inner: str) -> None:
    """Let ``module`` run ``forward(module, ...)``, which finds what ran before in the attribute ``inner``.

    The class of the module stays. ``torch.compile`` guards the function of a bound method, and the identity of any
    other callable: layers that share ``forward`` share a graph. Pickle saves a bound method by its name, so ``forward``
    must be called that; an unpickled module runs the forward of its class.
    """
    setattr(module, inner, module.forward)
    module.forward = MethodType(forward, module)


def discard_in(layer: nn.Module) -> None:
    """Let ``layer`` discard what its parts ask for; each part gets its :class:`DiscardedTensors` as an attribute."""
    wrap_forward(layer, _Discarding.forward, inner="discarding")
    dropped: Any = DiscardedTensors()
    for part in layer.modules():
        part.discarded_tensors = dropped


def discarded_in(part: nn.Module) -> DiscardedTensors | None:
    """Return the dropped tensors of the layer of ``part`` while that runs forward; None in layers that drop nothing, in
    compiled ones and in backward."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    dropped: DiscardedTensors | None = getattr(part, "discarded_tensors", None)
    return dropped if dropped is not None and dropped.runs else None


class _Discarding:
    @staticmethod
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return layer.discarding(*args, **kwargs)
        with layer.discarded_tensors.keeping():
            return layer.discarding(*args, **kwargs)


def discarded_output(
    module: nn.Module, compute: Callable[..., torch.Tensor], args: tuple[Any, ...], dropped: DiscardedTensors
) -> torch.Tensor:
    """Return ``compute(*args)`` of a norm or an activation function, and drop it.

    A module with parameters keeps what its operations keep, as a rule its input and a number per row. Of one without
    only the arguments are kept.
    """
    result: torch.Tensor
    if any(True for _ in module.parameters()):
        result = compute(*args)
        if isinstance(result, torch.Tensor):
            dropped.add(result, _Recomputed(compute, args, dropped))
        return result
    result = _RecomputedFunction.apply(compute, *args)  # type: ignore[no-untyped-call]
    if result.grad_fn is not None:
        dropped.add(result, _FunctionResult(result.grad_fn))
    return result


def cast_discarded(part: nn.Module, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor``, an input of ``part``, in ``dtype``; the copy of a dropped one is dropped as well."""
    cast, dropped = tensor.to(dtype), discarded_in(part)
    if cast is not tensor and dropped is not None and dropped.recipe(tensor) is not None:
        dropped.add(cast, _Recomputed(lambda source: source.to(dtype), (tensor,), dropped))
    return cast


class _Recomputed(Recipe):
    """The result of a function of tensors that are kept, or are discarded themselves."""

    def __init__(self, compute: Callable[..., torch.Tensor], args: tuple[Any, ...], dropped: DiscardedTensors) -> None:
        super().__init__()
        self._compute = compute
        self._args = [_source(value, dropped) for value in args]

    def make(self) -> torch.Tensor:
        return self._compute(*(value.take() if isinstance(value, Recipe) else value for value in self._args))


def _source(value: Any, dropped: DiscardedTensors) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    recipe = dropped.recipe(value)
    if recipe is None:
        return value.detach()
    recipe.use()
    return recipe


class _FunctionResult(Recipe):
    """The result of :class:`_RecomputedFunction`; making it also builds the graph that its backward needs."""

    def __init__(self, node: Any) -> None:
        super().__init__()
        self._node = node

    def make(self) -> torch.Tensor:
        output: torch.Tensor = _graph(self._node)[1]
        return output.detach()


class _RecomputedFunction(torch.autograd.Function):
    """Computes a function of tensors without parameters, and keeps the tensors alone."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        ctx.compute, ctx.others = compute, [None if isinstance(value, torch.Tensor) else value for value in args]
        ctx.places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        ctx.graph = None
        tensors = [args[place] for place in ctx.places]
        ctx.save_for_backward(*tensors)
        ctx.autocast = Recipe()
        ctx.autocast.remember_autocast(tensors[0])
        return compute(*args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, output = _graph(ctx)
        ctx.graph = None
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = dict(zip(map(id, wanted), torch.autograd.grad(output, wanted, grad), strict=True))
        grads: list[torch.Tensor | None] = [None] * (1 + len(ctx.others))
        for place, tensor in zip(ctx.places, inputs, strict=True):
            grads[1 + place] = gradients.get(id(tensor))
        return tuple(grads)


def _graph(ctx: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return inputs and output of the function, recomputed under autograd."""
    if ctx.graph is None:
        needed = [ctx.needs_input_grad[1 + place] for place in ctx.places]
        tensors = zip(ctx.saved_tensors, needed, strict=True)
        inputs = [tensor.detach().requires_grad_(wanted) for tensor, wanted in tensors]
        args = list(ctx.others)
        for place, tensor in zip(ctx.places, inputs, strict=True):
            args[place] = tensor
        with torch.enable_grad(), ctx.autocast._autocast():
            ctx.graph = inputs, ctx.compute(*args)
    graph: tuple[list[torch.Tensor], torch.Tensor] = ctx.graph
    return graph


def gather_discarded(
    block: nn.Module, hidden: torch.Tensor, dtype: torch.dtype, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return all ranks' ``hidden``, the input of ``block``, concatenated along ``dim`` as :func:`gather_along` does, in
    ``dtype``; backward keeps only ``hidden`` in it."""
    part = hidden.to(dtype)
    if torch.compiler.is_compiling():  # the graph contains the gather twice
        again: torch.Tensor = checkpoint(gather_along, part, dim, group, use_reentrant=False)
        return again
    whole, dropped = gather_along(part, dim, group), discarded_in(block)
    if dropped is not None:
        source = dropped.recipe(hidden)
        if source is not None:
            source.use()
        recipe = _GatheredAgain(part.detach() if source is None else source, dtype, dim, group)
        dropped.add(whole, recipe)
        dropped.block = weakref.ref(recipe)
    return whole


def prefetch_block_input(part: nn.Module, partial: torch.Tensor) -> None:
    """Start to gather the input of the block that ``part`` ends when the gradient of ``partial``, the block's last
    product, is known."""
    dropped = discarded_in(part)
    if dropped is not None and dropped.block is not None and partial.requires_grad:
        partial.register_hook(functools.partial(_begin, dropped.block))  # type: ignore[no-untyped-call]


def enter_within(block: Any, entry: Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Let the forward of a tensor block apply ``entry`` to its arguments.

    Within the forward, and not in a hook in front of it: a block that is recomputed then keeps its part of the
    sequence, too.
    """
    block.entry = entry
    wrap_forward(block, _Entering.forward, inner="entered")


class _Entering:
    @staticmethod
    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = discarded_in(block)
        if dropped is None:
            return block.entered(*block.entry(block, args), **kwargs)
        around, dropped.block = dropped.block, None
        output = block.entered(*block.entry(block, args), **kwargs)
        dropped.block = around
        return output


class _GatheredAgain(Recipe):
    def __init__(self, source: torch.Tensor | Recipe, dtype: torch.dtype, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._source, self._dtype, self._dim, self._group = source, dtype, dim, group
        self._pending: PendingGather | None = None

    def begin(self) -> None:
        """Start the gather, if an operation will ask for the tensor."""
        if self._pending is None and self.wanted:
            with torch.no_grad():
                part = self._source.take() if isinstance(self._source, Recipe) else self._source
                self._pending = PendingGather(part.to(self._dtype), self._dim, self._group)

    def make(self) -> torch.Tensor:
        self.begin()
        assert self._pending is not None, "asked for by more than keep it"
        pending, self._pending = self._pending, None
        return pending.wait()


def _begin(block: weakref.ref[Recipe], _: torch.Tensor) -> None:
    recipe = block()
    if isinstance(recipe, _GatheredAgain):
        recipe.begin()
