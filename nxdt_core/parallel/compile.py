"""``torch.compile``, layer by layer, and the time that compiling takes."""

from __future__ import annotations

import time
from types import TracebackType

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler

from nxdt_core.nn.patterns import matches
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["CompileClock", "compile_layers"]


def compile_layers(module: nn.Module, plan: ParallelPlan, *, backend: str, static_shapes: bool = False) -> None:
    """Let each layer's forward be compiled when it first runs.

    In place, without a change to the names of modules and parameters. Layers are compiled one by one: they share code
    and hence graphs, where a whole model would be compiled for as long as it is deep. What runs between them (hooks of
    fully_shard, sends of a pipeline) is left as it is.

    Args:
        module: one pipeline stage, sharded and with its recomputation already.
        plan: ``recompute_layer`` says what a layer is.
        backend: of ``torch.compile``; see :class:`nxdt_core.devices.DeviceProfile`.
        static_shapes: compile anew for each shape, where a second one would otherwise get a graph for any.
    """
    for path, part in module.named_modules():
        if matches(plan.recompute_layer, path) and not isinstance(part, nn.Identity):
            # Not part.compile(): that would take the hooks in, and leaves recomputed layers uncompiled (torch 2.13).
            part.forward = torch.compile(part.forward, backend=backend, dynamic=False if static_shapes else None)


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
