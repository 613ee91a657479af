"""What saving costs a run: columns for the metrics, and a row per checkpoint in a separate file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from nxdt_core.checkpoint import Manifest, SaveReport
from nxdt_core.train.run.metric_files import FigureFiles
from nxdt_core.train.step_times import StepTimes

__all__ = ["SAVES_FILE", "SaveFigures"]

SAVES_FILE = "saves.jsonl"
"""One JSON object per committed checkpoint."""


@dataclass(slots=True)
class _Save:
    """A save, and the steps after it."""

    step: int
    report: SaveReport | None = None
    slowdown: float | None = None
    """Of the steps after it, compared with those before."""
    over: bool = False
    """Whether these steps are."""

    def columns(self) -> dict[str, float | int | None]:
        assert self.report is not None, "only what is committed is shown"
        return {
            "blocked_s": self.report.blocked_s,
            "seconds": self.report.seconds,
            "bytes": self.report.manifest.size_bytes,
            "gb_per_s": self.report.gigabytes_per_s,
            "slowdown": self.slowdown,
        }


class SaveFigures:
    """Collects the reports of saves and the times of the steps around them.

    Args:
        files: of which ``saves.jsonl`` is one.
    """

    def __init__(self, files: FigureFiles) -> None:
        self._files = files
        self._times = StepTimes()
        self._step_began_at: float | None = None
        self._marked: _Save | None = None
        """The save whose next steps are being timed."""
        self._pending: dict[int, _Save] = {}
        self._newest: _Save | None = None
        self._captured_at: float | None = None
        """When the run was as the newest committed checkpoint has it, in seconds since the epoch."""

    @property
    def row(self) -> dict[str, float | int | None]:
        """Columns for the metrics; none until a checkpoint exists."""
        if self._captured_at is None:
            return {}
        newest = {} if self._newest is None else self._newest.columns()
        named = {"age_s": max(0.0, time.time() - self._captured_at), **newest}  # clocks are set, also backwards
        return {f"checkpoint_{name}": value for name, value in named.items()}

    def resumed(self, manifest: Manifest) -> None:
        """Take the age of the checkpoint from which the run resumes."""
        self._captured_at = datetime.fromisoformat(manifest.created).timestamp()

    def step_ended(self) -> None:
        """Count the time since the last call of this or of :meth:`step_began` as a step's."""
        now = time.perf_counter()
        if self._step_began_at is not None:
            self._times.step(now - self._step_began_at)
            if self._times.complete:
                self._close_mark()
        self._step_began_at = now

    def step_began(self) -> None:
        """Leave out the time since the last step: it was a save's or a validation's."""
        self._step_began_at = time.perf_counter()

    def begun(self, step: int) -> None:
        """Note that the save of ``step`` has begun: the steps from here on are compared with those before."""
        self._close_mark()
        self._marked = self._pending[step] = _Save(step)
        self._times.mark()

    def saved(self, report: SaveReport) -> None:
        """Record how long a committed save took and how large it is."""
        self._captured_at = report.captured_at
        self._newest = self._pending.setdefault(report.manifest.step, _Save(report.manifest.step))
        self._newest.report = report
        self._write_complete()

    def close(self) -> None:
        """Note the end of the run: no steps follow."""
        self._close_mark()

    def _close_mark(self) -> None:
        if self._marked is not None:
            self._marked.slowdown, self._marked.over = self._times.slowdown, True
            self._marked = None
            self._write_complete()

    def _write_complete(self) -> None:
        """Write the rows of checkpoints that are committed and whose next steps are over."""
        for save in [save for save in self._pending.values() if save.over and save.report is not None]:
            del self._pending[save.step]
            self._files.append(SAVES_FILE, {"step": save.step, **save.columns()})
