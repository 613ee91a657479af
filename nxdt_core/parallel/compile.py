"""``torch.compile``, layer by layer, and what it makes: graphs, and the time that they take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, UncapturedHigherOrderOpError, Unsupported, UserError
from torch._dynamo.utils import counters

from nxdt_core.errors.layouts import LayerNotWhole, TooManyGraphs
from nxdt_core.nn.patterns import matches
from nxdt_core.parallel.recompute import forward_within
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["CompileClock", "GraphCounts", "compile_layers"]

_log = logging.getLogger(__name__)

_GRAPHS = 64
"""Of one class of layers. Torch's own limit, 8, is soon reached by layers of several kinds in training, validation and
as a reference, with a graph for one length of sequences and one for any."""


def compile_layers(module: nn.Module, plan: ParallelPlan, *, backend: str, static_shapes: bool = False) -> None:
    """Let each layer's forward be compiled when it first runs.

    In place, without a change to the names of modules and parameters. Layers are compiled one by one: they share code
    and hence graphs, where a whole model would be compiled for as long as it is deep. What runs between them (hooks of
    fully_shard, sends of a pipeline) is left as it is.

    A layer is one graph. A class of layers of which torch cannot make one is compiled in pieces, and one that asks for
    ever more graphs runs as it is written; either is logged once.

    Args:
        module: one pipeline stage, sharded and with its recomputation already.
        plan: ``recompute_layer`` says what a layer is.
        backend: of ``torch.compile``; see :class:`nxdt_core.devices.DeviceProfile`.
        static_shapes: compile anew for each shape, where a second one would otherwise get a graph for any.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)
    limits.capture_scalar_outputs = True  # how many rows an expert gets is a size in the graph
    in_pieces: set[type[nn.Module]] = set()
    for path, part in module.named_modules():
        if matches(plan.recompute_layer, path) and not isinstance(part, nn.Identity):
            # Not part.compile(): that would take the hooks in, and leaves recomputed layers uncompiled (torch 2.13).
            # What is recomputed is compiled, and not its recomputation: that would be one graph with the layer twice in
            # backward, in which torch 2.13 cannot save the meshes of DTensors.
            forward, dynamic = forward_within(part), False if static_shapes else None
            compiled = _CompiledForward(path, part, getattr(part, forward), in_pieces, backend=backend, dynamic=dynamic)
            setattr(part, forward, compiled)


class _CompiledForward:
    """The forward of a layer."""

    def __init__(
        self,
        path: str,
        layer: nn.Module,
        forward: Callable[..., Any],
        in_pieces: set[type[nn.Module]],
        **options: Any,
    ) -> None:
        """``in_pieces``: classes of layers that are no graph, shared by the layers of a model."""
        self._path, self._kind, self._in_pieces = path, type(layer), in_pieces
        self._whole = torch.compile(forward, fullgraph=True, **options)
        self._pieces = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        if self._kind in self._in_pieces:
            return self._pieces(*args, **kwargs)
        try:
            return self._whole(*args, **kwargs)
        except (FailOnRecompileLimitHit, UncapturedHigherOrderOpError, Unsupported, UserError) as error:
            # Tracing has run nothing yet. Where it is the model that fails, that comes out here.
            output = self._pieces(*args, **kwargs)
            self._in_pieces.add(self._kind)
            kind = TooManyGraphs if isinstance(error, FailOnRecompileLimitHit) else LayerNotWhole
            _log.warning("%s", kind(path=self._path, layer=self._kind.__qualname__, reason=_reason(error)))
            return output


def _reason(error: Exception) -> str:
    """What torch says, without its hints."""
    return " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")


class GraphCounts:
    """What ``torch.compile`` makes anywhere in this process while the block runs.

    Example::

        with GraphCounts() as counts:
            train_step(...)
        print(counts.graphs, counts.breaks, counts.recompilations)
    """

    def __init__(self) -> None:
        self.graphs = 0
        """That a backend was given."""
        self.breaks = 0
        """Places where a graph ended because torch could not trace what followed."""
        self.recompilations = 0
        """Compilations of code that had been compiled before: for training and validation, another kind of layer, or
        because something changed."""

    def __enter__(self) -> GraphCounts:
        self._before = self._totals()
        callback_handler.register_start_callback(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        callback_handler.remove_start_callback(self._start)
        graphs, breaks = self._totals()
        self.graphs, self.breaks = graphs - self._before[0], breaks - self._before[1]

    @staticmethod
    def _totals() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def _start(self, arguments: CallbackArgs) -> None:
        of_dynamo = arguments.callback_trigger is CallbackTrigger.DYNAMO
        self.recompilations += of_dynamo and not str(arguments.compile_id).endswith("/0")


class CompileClock:
    """Seconds that torch spends compiling anywhere in this process, while the block runs.

    Example::

        with CompileClock() as clock:
            train_step(...)
        print(clock.seconds)

    Forward is compiled when it first runs, and backward with it or when that first runs.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """So far; grows while the block runs."""
        self._begun = 0.0

    def __enter__(self) -> CompileClock:
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self._begun = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self._begun
