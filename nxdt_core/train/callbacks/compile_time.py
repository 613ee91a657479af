"""How long ``torch.compile`` took, said apart from the time of the steps."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import final

from torch._dynamo.callback import CallbackArgs, callback_handler

from nxdt_core.callback import Callback, Run
from nxdt_core.engine.compile_cache import graph_origins
from nxdt_core.progress import PROGRESS

__all__ = ["CompileClock", "CompileTime"]


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


@final
class CompileTime(Callback):
    """Says how many seconds went into compiling, after the first step and each later one that compiled, and which
    graphs came from the cache.

    Where ``model.compile`` is set, it also says before the first step that this one takes longer.

    Loggers get ``perf/compile_time_s``, the seconds of the run so far.
    """

    def __init__(self) -> None:
        self._clock = CompileClock()
        self._running = ExitStack()
        self._reported_s = 0.0
        self._reported = graph_origins()

    def on_fit_start(self, run: Run) -> None:
        """Start to measure the seconds that compiling takes."""
        self._running.enter_context(self._clock)
        if run.config.run.model.compile:
            run.say("compiling: the first step takes longer")

    def on_step_end(self, run: Run) -> None:
        """Say what the step compiled."""
        seconds = self._clock.seconds
        if seconds == self._reported_s:
            return
        if PROGRESS.start:  # the first step
            PROGRESS.spent("compile", seconds)
        graphs = graph_origins()
        took = seconds - self._reported_s
        run.say(f"step {run.step}: compiling took {took:.1f} s (graphs: {graphs - self._reported})")
        self._reported_s, self._reported = seconds, graphs
        run.log({"compile_time_s": seconds})

    def close(self, run: Run) -> None:
        """Stop measuring."""
        self._running.close()
