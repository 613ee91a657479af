"""Costs of a run: traces of torch's profiler, and the time of compilations."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path
from typing import Literal, final

from torch.profiler import profile, schedule

from nxdt_core.callback import Callback, Run
from nxdt_core.engine.compile_cache import compile_seconds, graph_origins
from nxdt_core.system.progress import PROGRESS
from nxdt_core.system.regular_files import replace_text

_STEPS = schedule(wait=1, warmup=1, active=3, repeat=1)
"""Steps whose trace is kept: those of a compiled model have ended to compile by then."""


@final
class Profiler(Callback):
    """Writes one file for this rank.

    Args:
        kind: ``simple``, seconds in the 40 functions of nxdt and its plugins that take longest; ``advanced``, in every
            Python function; ``pytorch``, a trace of operations and kernels in some steps, for ``chrome://tracing`` and
            https://ui.perfetto.dev.
        directory: exists.
    """

    def __init__(self, kind: Literal["simple", "advanced", "pytorch"], directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._python = cProfile.Profile()
        self._torch = None
        if kind == "pytorch":
            target = str(directory / "training_steps.json")
            self._torch = profile(schedule=_STEPS, on_trace_ready=lambda trace: trace.export_chrome_trace(target))

    def on_fit_start(self, run: Run) -> None:
        """Begin to measure."""
        if self._torch is None:
            self._python.enable()
        else:
            self._torch.start()

    def on_step_end(self, run: Run) -> None:
        """Count a step."""
        if self._torch is not None:
            self._torch.step()

    def close(self, run: Run) -> None:
        """Write what was measured."""
        if self._torch is not None:
            self._torch.stop()
            return
        self._python.disable()
        table = io.StringIO()
        statistics = pstats.Stats(self._python, stream=table).sort_stats("cumulative")
        wanted: tuple[str | int, ...] = (r"nxdt_(core|plugin_)", 40) if self._kind == "simple" else ()
        statistics.print_stats(*wanted)
        replace_text(self._directory / f"{self._kind}.txt", table.getvalue())


@final
class CompileTime(Callback):
    """Says how many seconds went into compiling, after the first step and each later one that compiled, and which
    graphs came from the cache.

    Where ``model.compile`` is set, it also says before the first step that this one takes longer.

    Loggers get ``perf/compile_time_s``, the seconds of the run so far.
    """

    def __init__(self) -> None:
        self._begun_s = self._reported_s = compile_seconds()
        self._reported = graph_origins()

    def on_fit_start(self, run: Run) -> None:
        """Start to measure the seconds that compiling takes."""
        self._begun_s = self._reported_s = compile_seconds()
        if run.config.run.model.compile:
            run.say("compiling: the first step takes longer")

    def on_step_end(self, run: Run) -> None:
        """Say what the step compiled."""
        spent_s = compile_seconds()
        if spent_s == self._reported_s:
            return
        if PROGRESS.start:  # the first step
            PROGRESS.spent("compile", spent_s - self._begun_s)
        graphs, took = graph_origins(), spent_s - self._reported_s
        run.say(f"step {run.step}: compiling took {took:.1f} s (graphs: {graphs - self._reported})")
        self._reported_s, self._reported = spent_s, graphs
        run.log({"compile_time_s": spent_s - self._begun_s})
