"""Runs stages one after the other, each in a separate process with a time limit. Standard library only.

While a stage measures, the process of the next one makes its imports and waits for its turn.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from accelerator.results import Record, Results, read_rows
from accelerator.stages import Stage

__all__ = ["Day", "end_on_sigterm"]

_Process = subprocess.Popen[bytes]

_BENCHMARKS = Path(__file__).parents[1]
_LAST_LINES = 12
"""Of a log, as the error of a stage that failed."""
_SMALL_S = 300.0
"""Least time limit of a small run: a CPU may be busy with other work."""
_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Day:
    """One call: what it may take, and where everything goes.

    A record of an earlier call in the same folder is kept: only stages without one are run, and those that a kill
    interrupted.
    """

    out: Path
    """Results, logs, and the compile caches that later calls reuse."""
    deadline: float
    """``time.monotonic()`` at which the call has to end; infinity for never."""
    small: bool = False
    """Tiny shapes that run on a CPU."""
    compiles: bool = False
    """Compile in small runs too."""
    retry: bool = False
    """Run stages again that did not end well."""
    path: Sequence[str] = ()
    """Directories for the ``PYTHONPATH`` of stages, before the caller's."""

    def run(self, stages: Sequence[Stage]) -> Results:
        """Run what is missing and fits; returns all records of the folder."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        results = Results(self.out)
        missing = [stage for stage in stages if self._is_missing(results.records.get(stage.name))]
        waiting: dict[Stage, _Process] = {}
        try:
            for stage, following in zip_longest(missing, missing[1:]):
                if not self._fits(stage):
                    print(
                        f"{stage.name}: not started, its limit of {stage.minutes:g} min exceeds what is left",
                        flush=True,
                    )
                    continue
                self._run(stage, following, waiting, results)
                if stage.name == "machine" and not self.small and not _accelerators(results):
                    print("no accelerator on this machine; --small tries the stages on a CPU", flush=True)
                    break
        finally:
            for stage, process in waiting.items():
                self._end(stage, process)
        return results

    def _is_missing(self, record: Record | None) -> bool:
        outcome = "running" if record is None else record["outcome"]
        return outcome in ("running", "interrupted") or (self.retry and outcome != "ok")

    def _fits(self, stage: Stage) -> bool:
        return self.deadline - time.monotonic() >= self._limit_s(stage)

    def _run(self, stage: Stage, following: Stage | None, waiting: dict[Stage, _Process], results: Results) -> None:
        """Run one stage; the one after it begins to wait for its turn."""
        process = waiting.pop(stage, None)
        if process is None or process.poll() is not None:  # a kill, or its imports, ended it while it waited
            process = self._start(stage)
        results.put(stage.name, self._record(stage, "running", 0.0))
        begun, outcome = time.monotonic(), "interrupted"
        try:
            _open_gate(process)
            if following is not None and self._fits(following):
                waiting[following] = self._start(following)
            outcome = "failed" if process.wait(self._stop_after_s(stage)) else "ok"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        finally:
            self._end(stage, process)
            record = self._record(stage, outcome, time.monotonic() - begun)
            results.put(stage.name, record)
        print(f"{stage.name}: {outcome}, {record['seconds']:.0f} s", flush=True)

    def _start(self, stage: Stage) -> _Process:
        """Start the process of a stage, which makes its imports and waits."""
        self._file(stage, ".jsonl").unlink(missing_ok=True)
        work = self._work(stage)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        command = [
            *(sys.executable, "-m", "accelerator.child", stage.work, json.dumps(dict(stage.options))),
            *("--rows", str(self._file(stage, ".jsonl")), "--work", str(work), "--imports", ",".join(stage.imports)),
            *(("--small",) if self.small else ()),
            *(("--compile",) if self.compiles else ()),
        ]
        with self._file(stage, ".log").open("wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                process_group=0,
            )

    def _end(self, stage: Stage, process: _Process) -> None:
        """End what is left of the stage's process group: compile workers and ranks are its children."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_GRACE_S)
        shutil.rmtree(self._work(stage), ignore_errors=True)

    def _work(self, stage: Stage) -> Path:
        return self.out / "work" / stage.name

    def _limit_s(self, stage: Stage) -> float:
        return max(_SMALL_S, 60 * stage.minutes) if self.small else 60 * stage.minutes

    def _stop_after_s(self, stage: Stage) -> float:
        """Return twice the limit, as far as the call has time: the stages that then have none are worth less."""
        limit = self._limit_s(stage)
        return min(2 * limit, max(limit, self.deadline - time.monotonic()))

    def _environment(self) -> dict[str, str]:
        caches = self.out / "cache"
        path = [str(_BENCHMARKS), *self.path, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "HF_HUB_OFFLINE": "1",
            # Tiny shapes: a second thread only waits for the first.
            **({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if self.small else {}),
        }

    def _record(self, stage: Stage, outcome: str, seconds: float) -> Record:
        log = self._file(stage, ".log")
        record = {
            "group": stage.group,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "rows": read_rows(self._file(stage, ".jsonl")),
            "log": str(log.relative_to(self.out)),
        }
        if outcome in ("failed", "timeout"):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            record["error"] = "\n".join(lines[-_LAST_LINES:])
        return record

    def _file(self, stage: Stage, suffix: str) -> Path:
        return self.out / "logs" / f"{stage.name}{suffix}"


def end_on_sigterm() -> None:
    """Let SIGTERM end this process by an exception, so that the running stage is recorded and ended first."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _accelerators(results: Results) -> list[str]:
    """Return the types of accelerators that the stage ``machine`` has found."""
    return [row["accelerator"] for row in results.records["machine"]["rows"] if row.get("accelerator")]


def _open_gate(process: _Process) -> None:
    """Let the process of a stage begin. Without this byte, when the pipe is closed, it ends."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: its status and its log say why
        process.stdin.write(b"\n")
        process.stdin.close()
