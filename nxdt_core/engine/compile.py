"""``torch.compile``: layers one by one, functions as one graph, and asynchronous tensor parallelism of compiled layers.

Asynchronous: compiled layers compute with the parts of a tensor that have arrived. A pass of inductor takes the
all-gather before a product, or the reduce-scatter behind one, into the product (Wang et al. 2023,
doi:10.1145/3567955.3567959). Its kernels copy parts between the symmetric memory of the ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.recompute import is_recomputed
from nxdt_core.errors.layouts import LayerNotWhole, TooManyGraphs
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import modules_at
from nxdt_core.models.step_boundary import at_step_boundary, step_of
from nxdt_core.protocols.plan import ParallelPlan

_log = logging.getLogger(__name__)
_GRAPHS = 64
"""Graphs per class of layers, and per function. Layers of several kinds soon reach torch's default limit, 8: in
training, in validation and as a reference, each with a graph for one sequence length and one for any."""
_IDS = "document_ids"
"""Name of the argument of layers and attention cores that holds the document ids."""
Result = TypeVar("Result")


def compile_layers(module: nn.Module, plan: ParallelPlan, *, backend: str, static_shapes: bool = False) -> None:
    """Compile each layer's forward when it first runs.

    Modules change in place; the names of modules and parameters stay the same. Layers are compiled one by one: they
    share code and therefore graphs, whereas the time to compile a whole model grows with its depth. Code between the
    layers (hooks of fully_shard, sends of a pipeline) is not compiled.

    A layer is one graph. If torch cannot make one graph of a class of layers, the class is compiled in pieces. If a
    class keeps requesting more graphs, it runs without compilation. Each case is logged once.

    Args:
        module: one pipeline stage, already sharded and with recomputation applied.
        plan: ``recompute_layer`` says what a layer is.
        backend: of ``torch.compile``; see :class:`nxdt_core.distributed.devices.DeviceProfile`.
        static_shapes: compile again for each shape; otherwise, a second shape gets a graph for any shape.
    """
    torch._dynamo.config.capture_scalar_outputs = True  # how many rows an expert gets is a size in the graph
    in_graphs: set[type[nn.Module]] = set()
    for path, part in modules_at(module, (plan.recompute_layer,)).items():
        # Not part.compile(): that would take the hooks in, and leaves recomputed layers uncompiled (torch 2.13).
        # What is recomputed is compiled, and not its recomputation: that would be one graph with the layer twice in
        # backward, in which torch 2.13 cannot save the meshes of DTensors.
        forward = "computed" if is_recomputed(part) else "forward"
        dynamic = False if static_shapes else None
        compiled = _CompiledForward(path, part, getattr(part, forward), in_graphs, backend=backend, dynamic=dynamic)
        setattr(part, forward, compiled)


class _CompiledForward:
    """The forward of a layer."""

    def __init__(
        self,
        path: str,
        layer: nn.Module,
        forward: Callable[..., Any],
        in_graphs: set[type[nn.Module]],
        **options: Any,
    ) -> None:
        """``in_graphs``: classes of layers that cannot be one graph, shared by the layers of a model."""
        self._path, self._kind, self._in_graphs = path, type(layer), in_graphs
        self._whole = one_graph(forward, **options)
        self._graphs = torch.compile(forward, **options)
        cores: list[Any] = [part for part in layer.modules() if isinstance(getattr(part, "masks", None), DocumentMasks)]
        self._cores = [core for core in cores if hasattr(core, "made")]
        """Attention cores whose document masks are made before the graph runs; all layers share them."""
        names = [*inspect.signature(type(layer).forward).parameters][1:]  # without self
        self._position = names.index(_IDS) if _IDS in names else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's own forward returns, from the compiled graph."""
        ids = kwargs.get(_IDS)
        if ids is None and self._position is not None and self._position < len(args):
            ids = args[self._position]
        if ids is None or not self._cores:
            return self._compiled(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        dtype = compute_dtype(next(tensor for tensor in tensors if tensor.is_floating_point()))
        masks = dict(core.made(ids, dtype) for core in self._cores)
        step = replace(step_of(kwargs.get("step")), masks=masks)
        if "step" in kwargs:
            return self._compiled(*args, **{**kwargs, "step": step})
        with at_step_boundary(step):
            return self._compiled(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind in self._in_graphs:
            return self._graphs(*args, **kwargs)
        exc = torch._dynamo.exc
        try:
            return self._whole(*args, **kwargs)
        except (exc.FailOnRecompileLimitHit, exc.UncapturedHigherOrderOpError, exc.Unsupported, exc.UserError) as error:
            # Tracing has run nothing yet. Where it is the model that fails, that comes out here.
            output = self._graphs(*args, **kwargs)
            self._in_graphs.add(self._kind)
            kind = TooManyGraphs if isinstance(error, exc.FailOnRecompileLimitHit) else LayerNotWhole
            reason = " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")  # without torch's hints
            _log.warning("%s", kind(path=self._path, layer=self._kind.__qualname__, reason=reason))
            return output


def one_graph(function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """Return ``function`` compiled into one graph when it first runs.

    Under a dispatch mode of the caller, such as :class:`torch.utils.flop_counter.FlopCounterMode`, torch runs every
    operation eagerly, so that the mode sees it, and then raises an error because there is no graph. Here the function
    runs as written instead.

    Args:
        function: to compile; it breaks the graph nowhere.
        options: of :func:`torch.compile`, such as ``backend`` and ``dynamic``.
    """
    compiled: Callable[..., Result] = torch.compile(function, fullgraph=True, **options)
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        observed = is_in_torch_dispatch_mode(include_infra_modes=False)
        return function(*args, **kwargs) if observed else compiled(*args, **kwargs)

    return call


def pipeline_collectives(mesh: ParallelMesh) -> None:
    """Let layers that are compiled from now on overlap tensor parallel collectives with products.

    Every rank of the group calls it. The switch is torch's, of the process, and part of the key of a cached graph.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = mesh.group("tp")
    if group is None:
        return
    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
