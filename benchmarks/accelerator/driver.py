"""Runs stages one after the other, each in a separate process with a time limit. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerator.forks import Fork, Forks
from accelerator.results import Record, Results, read_rows
from accelerator.stages import Stage

__all__ = ["Day", "end_on_sigterm"]

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
        forks = Forks(self._environment()) if self.small else None
        try:
            self._run(stages, results, forks)
        finally:
            if forks is not None:
                forks.close()
        return results

    def _run(self, stages: Sequence[Stage], results: Results, forks: Forks | None) -> None:
        for stage in stages:
            outcome = results.records.get(stage.name, {}).get("outcome", "running")
            if outcome not in ("running", "interrupted") and not (self.retry and outcome != "ok"):
                continue
            if self.deadline - time.monotonic() < self._limit_s(stage):
                print(f"{stage.name}: not started, its limit of {stage.minutes:g} min exceeds what is left", flush=True)
                continue
            results.put(stage.name, self._record(stage, "running", 0.0))
            begun = time.monotonic()
            try:
                outcome = self._child(stage, forks)
            except BaseException:
                results.put(stage.name, self._record(stage, "interrupted", time.monotonic() - begun))
                raise
            record = self._record(stage, outcome, time.monotonic() - begun)
            results.put(stage.name, record)
            print(f"{stage.name}: {outcome}, {record['seconds']:.0f} s", flush=True)
            if stage.name == "machine" and not self.small and not any(row.get("accelerator") for row in record["rows"]):
                print("no accelerator on this machine; --small tries the stages on a CPU", flush=True)
                break

    def _child(self, stage: Stage, forks: Forks | None) -> str:
        """Run the process of a stage: ``ok``, ``failed`` or ``timeout``."""
        self._file(stage, ".jsonl").unlink(missing_ok=True)
        work = self.out / "work" / stage.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        arguments = [
            *(stage.work, json.dumps(dict(stage.options))),
            *("--rows", str(self._file(stage, ".jsonl")), "--work", str(work)),
            *(("--small",) if self.small else ()),
            *(("--compile",) if self.compiles else ()),
        ]
        process = self._start(arguments, self._file(stage, ".log"), forks)
        try:
            return "ok" if process.wait(self._limit_s(stage)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _end(process)
            shutil.rmtree(work, ignore_errors=True)

    def _start(self, arguments: Sequence[str], log: Path, forks: Forks | None) -> subprocess.Popen[bytes] | Fork:
        if forks is not None:
            return forks.start(arguments, log)
        command = [sys.executable, "-m", "accelerator.child", *arguments]
        with log.open("wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self._environment(), process_group=0
            )

    def _limit_s(self, stage: Stage) -> float:
        return max(_SMALL_S, 60 * stage.minutes) if self.small else 60 * stage.minutes

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


def _end(process: subprocess.Popen[bytes] | Fork) -> None:
    """End what is left of the stage's process group: compile workers and ranks are its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
