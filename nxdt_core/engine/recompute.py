"""Activation recomputation: what a module computes in forward is discarded and computed again when backward needs it.

Mostly the next operation keeps the output of such a module. The output of some is discarded too, while their inputs are
kept: autograd keeps a recipe in its place. No matrix product runs twice. (Megatron-LM's ``recompute_modules``.)

The input of a tensor block is one such tensor: this rank's part of the sequence is kept, and gathered again in backward
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). One gather serves all matrices of a block. It begins when
the gradient of the block's last product is known, so that it overlaps with the backward of the rest of the block.

Outputs are discarded of layers as they are written. A compiled layer tags in its graph what is computed again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nxdt_core.distributed.collectives import PendingGather, gather_along
from nxdt_core.errors.models import UnknownRecomputeName
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.host_values import HostValues
from nxdt_core.models.patterns import matches_any, modules_at
from nxdt_core.models.step_boundary import at_step_boundary, step_of
from nxdt_core.protocols.plan import ParallelPlan


class Recipe:
    """Computes one discarded tensor again, once for all operations that need it in backward."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        """``make``: returns the tensor as it was in forward, in the same layout."""
        self._make = make
        self.uses = 0
        """Operations that will still ask for the tensor."""
        self._value: torch.Tensor | None = None
        self.autocast: Callable[[], AbstractContextManager[None]] = nullcontext

    def use(self) -> Recipe:
        """Count one more operation that will ask for the tensor."""
        self.uses += 1
        return self

    def take(self) -> torch.Tensor:
        """Return the tensor, which is discarded again when the last user has taken it."""
        value = self._value
        if value is None:
            with torch.no_grad(), self.autocast():
                value = self._make()
        self.uses -= 1
        self._value = value if self.uses > 0 else None
        return value


def autocast_now(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return the current autocast state of the tensor's device, which backward does not have, as a context to enter."""
    if tensor.is_meta:
        return nullcontext
    kind = tensor.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class DiscardedTensors:
    """The discarded tensors of a layer while it runs, by storage: views of one are discarded with it."""

    def __init__(self) -> None:
        self.runs = False
        """True while the layer runs forward and autograd will run backward through it."""
        self.block: weakref.ref[Recipe] | None = None
        """The input of the tensor block that runs, where it is made again in backward."""
        self._recipes: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Recipe, torch.dtype, int]]
        self._recipes = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[DiscardedTensors], tuple[()]]:
        """Return how to copy or unpickle it: empty, as it is between forward passes."""
        return DiscardedTensors, ()

    def add(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Discard ``tensor``, a new one, after forward."""
        recipe.autocast = autocast_now(tensor)
        self._recipes[tensor.untyped_storage()] = (recipe, tensor.dtype, tensor._version)

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """Return the recipe of ``tensor``; None if it is kept, is a view or was changed in place."""
        entry = self._recipes.get(tensor.untyped_storage())
        if entry is None or entry[1] != tensor.dtype or entry[2] != tensor._version or tensor._is_view():
            return None
        return entry[0]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Let autograd save recipes instead of discarded tensors within the block, the layer's forward."""

        def pack(tensor: torch.Tensor) -> torch.Tensor | _SavedRecipe:
            if type(tensor) is not torch.Tensor:
                return tensor
            entry = self._recipes.get(tensor.untyped_storage())
            if entry is None or entry[1] != tensor.dtype or entry[2] != tensor._version:
                # A result that its own node keeps would keep the node.
                return tensor if tensor.grad_fn is None else tensor.detach()
            return entry[0].use(), tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: torch.Tensor | _SavedRecipe) -> torch.Tensor:
            return saved if isinstance(saved, torch.Tensor) else saved[0].take().as_strided(*saved[1:])

        self.runs = True
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self.runs = False
            self._recipes.clear()


_SavedRecipe = tuple[Recipe, torch.Size, tuple[int, ...], int | torch.SymInt]
"""Replaces a discarded tensor, or a view of one, among the tensors that autograd saves: with size, stride, offset."""


def wrap_forward(module: nn.Module, forward: Callable[..., Any], *, inner: str) -> None:
    """Let ``module`` run ``forward(module, ...)``, which finds what ran before in the attribute ``inner``.

    The class of the module stays. ``torch.compile`` guards the function of a bound method, and the identity of any
    other callable: layers that share ``forward`` share a graph. Pickle saves a bound method by its name, so ``forward``
    must be called that; an unpickled module runs the forward of its class.
    """
    setattr(module, inner, module.forward)
    module.forward = MethodType(forward, module)


def discards_of(part: nn.Module) -> DiscardedTensors | None:
    """Return the discarded tensors of the layer of ``part`` while that runs forward; None in layers that discard
    nothing, in compiled ones and in backward."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    discarded: DiscardedTensors | None = getattr(part, "discarded_tensors", None)
    return discarded if discarded is not None and discarded.runs else None


class _Discarding:
    @staticmethod
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return layer.discarding(*args, **kwargs)
        with layer.discarded_tensors.keeping():
            return layer.discarding(*args, **kwargs)


def discarded_output(
    module: nn.Module, compute: Callable[..., torch.Tensor], args: tuple[Any, ...], discarded: DiscardedTensors
) -> torch.Tensor:
    """Return ``compute(*args)`` of a norm or an activation function, and drop it.

    A module with parameters keeps what its operations keep, as a rule its input and a number per row. Of one without
    only the arguments are kept.
    """
    result: torch.Tensor
    if any(True for _ in module.parameters()):
        result = compute(*args)
        if isinstance(result, torch.Tensor):
            discarded.add(result, _recomputed(compute, args, discarded))
        return result
    result = _RecomputedFunction.apply(compute, *args)  # type: ignore[no-untyped-call]
    if result.grad_fn is not None:
        discarded.add(result, Recipe(functools.partial(_output, result.grad_fn)))
    return result


def cast_discarded(part: nn.Module, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor``, an input of ``part``, in ``dtype``; the copy of a discarded one is discarded as well."""
    cast, discarded = tensor.to(dtype), discards_of(part)
    if cast is not tensor and discarded is not None and discarded.recipe(tensor) is not None:
        discarded.add(cast, _recomputed(lambda source: source.to(dtype), (tensor,), discarded))
    return cast


def _recomputed(compute: Callable[..., torch.Tensor], args: tuple[Any, ...], discarded: DiscardedTensors) -> Recipe:
    """Return the recipe of a function's result; its tensors are kept, or are discarded themselves."""
    kept: list[Any] = []
    for value in args:
        recipe = discarded.recipe(value) if isinstance(value, torch.Tensor) else None
        detached = value.detach() if isinstance(value, torch.Tensor) else value
        kept.append(detached if recipe is None else recipe.use())
    return Recipe(lambda: compute(*(value.take() if isinstance(value, Recipe) else value for value in kept)))


class _RecomputedFunction(torch.autograd.Function):
    """Computes a function of tensors without parameters, and keeps the tensors alone."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        ctx.compute, ctx.others = compute, [None if isinstance(value, torch.Tensor) else value for value in args]
        ctx.places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        ctx.graph = None
        tensors = [args[place] for place in ctx.places]
        ctx.save_for_backward(*tensors)
        ctx.autocast = autocast_now(tensors[0])
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
        with torch.enable_grad(), ctx.autocast():
            ctx.graph = inputs, ctx.compute(*args)
    graph: tuple[list[torch.Tensor], torch.Tensor] = ctx.graph
    return graph


def _output(ctx: Any) -> torch.Tensor:
    """Return the output of the function, and build the graph that its backward needs."""
    return _graph(ctx)[1].detach()


def gather_discarded(
    block: nn.Module, hidden: torch.Tensor, dtype: torch.dtype, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return all ranks' ``hidden``, the input of ``block``, concatenated along ``dim`` as :func:`gather_along` does, in
    ``dtype``; backward keeps only ``hidden`` in it."""
    part = hidden.to(dtype)
    if torch.compiler.is_compiling():  # the graph contains the gather twice
        again: torch.Tensor = checkpoint(gather_along, part, dim, group, use_reentrant=False)
        return again
    whole, discarded = gather_along(part, dim, group), discards_of(block)
    if discarded is not None:
        source = discarded.recipe(hidden)
        recipe = _GatheredAgain(part.detach() if source is None else source.use(), dtype, dim, group)
        discarded.add(whole, recipe)
        discarded.block = weakref.ref(recipe)
    return whole


def prefetch_block_input(part: nn.Module, partial: torch.Tensor) -> None:
    """Start to gather the input of the block that ``part`` ends when the gradient of ``partial``, the block's last
    product, is known."""
    discarded = discards_of(part)
    if discarded is not None and discarded.block is not None and partial.requires_grad:
        partial.register_hook(functools.partial(_begin, discarded.block))  # type: ignore[no-untyped-call]


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
        discarded = discards_of(block)
        if discarded is None:
            return block.entered(*block.entry(block, args), **kwargs)
        around, discarded.block = discarded.block, None
        output = block.entered(*block.entry(block, args), **kwargs)
        discarded.block = around
        return output


class _GatheredAgain(Recipe):
    def __init__(self, source: torch.Tensor | Recipe, dtype: torch.dtype, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__(self._gathered)
        self._source, self._dtype, self._dim, self._group = source, dtype, dim, group
        self._pending: PendingGather | None = None

    def begin(self) -> None:
        """Start the gather, if an operation will ask for the tensor."""
        if self._pending is None and self.uses > 0:
            with torch.no_grad():
                part = self._source.take() if isinstance(self._source, Recipe) else self._source
                self._pending = PendingGather(part.to(self._dtype), self._dim, self._group)

    def _gathered(self) -> torch.Tensor:
        self.begin()
        assert self._pending is not None, "asked for by more than keep it"
        pending, self._pending = self._pending, None
        return pending.wait()


def _begin(block: weakref.ref[Recipe], _: torch.Tensor) -> None:
    recipe = block()
    if isinstance(recipe, _GatheredAgain):
        recipe.begin()


def apply_recompute(
    module: nn.Module,
    plan: ParallelPlan,
    *,
    granularity: Literal["full", "selective"] | None,
    names: Sequence[str] = (),
) -> None:
    """Let parts of ``module`` save only their inputs for backward.

    Of cheap ones in a layer, such as norms and activation functions, the result is discarded, too: what reads it gets
    it from a second computation.

    In place, without a change to the names of modules and parameters. Recomputation may nest. Random numbers are drawn
    as they were the first time, so that gradients are bit-equal.

    Args:
        module: one pipeline stage, sharded already; patterns that match nothing here belong to other stages.
        plan: says what a layer is and which modules each name means.
        granularity: ``full`` recomputes whole layers, ``selective`` what ``names`` say, None nothing.
        names: keys of ``plan.recompute``; read under ``selective`` alone.

    Raises:
        UnknownRecomputeName: the plan has no such name.
    """
    if granularity is None:
        return
    unknown = [name for name in names if name not in plan.recompute]
    if granularity == "selective" and unknown:
        raise UnknownRecomputeName(names=unknown, known=sorted(plan.recompute))
    layers = (plan.recompute_layer,)
    named = [pattern for name in names for pattern in plan.recompute.get(name, ())]
    patterns = layers if granularity == "full" else named
    chosen = modules_at(module, patterns)
    for part in chosen.values():
        # Wrapped is the forward alone. Hooks then run once, outside: those of fully_shard, whose weights are gathered
        # again by the time backward asks, and those that enter a tensor block. (The hooks of
        # torch.distributed._composable.checkpoint call the module, and so other hooks, twice on the same input.)
        wrap_forward(part, _Recomputed.forward, inner="computed")
        part.discards_output = False
    if granularity != "selective":
        return
    # The outputs of cheap ones are discarded, except inside another module that is recomputed.
    cheap = [part for path, part in chosen.items() if matches_any(plan.cheap, path)]
    inside = {part for outer in module.modules() if is_recomputed(outer) for part in outer.modules() if part != outer}
    for part in cheap:
        if part not in inside:
            part.discards_output = True
    if not all(part in inside for part in cheap):
        discard_in_layers(module, plan)
        # The matrices of a tensor block share one copy of a discarded output in autocast's dtype. Autocast itself makes
        # one for each, which could not be discarded. Routers of experts read the output uncast.
        for path, block in modules_at(module, plan.tensor_blocks).items():
            if not routes_tokens(path, block, plan):
                block.register_forward_pre_hook(_cast)


def discard_in_layers(module: nn.Module, plan: ParallelPlan) -> None:
    """Let the layers of ``module`` discard what their parts compute again, unless the layers are recomputed."""
    for layer in modules_at(module, (plan.recompute_layer,)).values():
        if not (is_recomputed(layer) or hasattr(layer, "discarded_tensors")):
            wrap_forward(layer, _Discarding.forward, inner="discarding")
            discarded: Any = DiscardedTensors()
            for part in layer.modules():
                part.discarded_tensors = discarded


def parts_of_recomputed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what is inside a recomputed module, which is itself among them: all of it is computed again anyway."""
    for part in module.modules():
        if is_recomputed(part):
            yield from part.modules()


def routes_tokens(path: str, block: nn.Module, plan: ParallelPlan) -> bool:
    """Return whether a router or experts are inside the tensor block at ``path``."""
    routers = (*plan.experts.routers, *plan.experts.modules)
    return any(matches_any(routers, f"{path}.{name}") for name, _ in block.named_modules() if name)


def _cast(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    discarded = discards_of(block)
    if discarded is None or not args or not isinstance(args[0], torch.Tensor) or discarded.recipe(args[0]) is None:
        return args
    return cast_discarded(block, args[0], compute_dtype(args[0])), *args[1:]


def is_recomputed(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` runs its attribute ``computed`` twice."""
    return "computed" in vars(module)


class _Recomputed:
    @staticmethod
    def forward(part: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what masks of dropout depend on is an input of the graph
            return checkpoint(part.computed, *args, use_reentrant=False, **kwargs)
        discarded = discards_of(part) if part.discards_output and not kwargs else None
        if discarded is not None:
            return discarded_output(part, part.computed, args, discarded)
        values, step = HostValues(), step_of(None)

        def computed(*args: Any, **kwargs: Any) -> Any:
            with at_step_boundary(step):  # the second computation may run during another micro-batch
                return part.computed(*args, **kwargs)

        contexts = values.recorded(), values.repeated()
        return checkpoint(computed, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
