"""Progress of this process, as evidence that it is not hung, and the time that its start took. Torch-free.

Long work reports each piece that it finishes: a training step, a batch of a validation, a block of a file. In a run of
many ranks the supervisor hears of it (:mod:`nxdt_core.launch.supervision.heartbeat`); elsewhere no process does, and
the reports cost an addition.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Progress:
    """The newest piece of work of a process, and how many there were.

    Example::

        from nxdt_core.system.progress import PROGRESS

        for block in blocks:
            upload(block)
            PROGRESS.advance("upload to my store")
    """

    count: int = 0
    """Pieces of work done."""
    phase: str = "start"
    """Phase that the newest piece belongs to, such as ``validation``."""
    step: int = 0
    """Training steps that the run has done."""
    supervised: bool = False
    """A supervisor watches this process and finds out which rank hangs. Collectives then wait longer than it does, so
    that it reports the rank that hangs, rather than torch the ranks that wait."""

    start: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of ``nxdt train`` to the first training step, by what they were spent on."""
    counted_at: float | None = None
    """Monotonic time from which the next :meth:`spent` counts; None in a process that does not count."""

    def spent(self, part: str, seconds: float | None = None) -> None:
        """Count time until the first training step as that of ``part``, in a process that has begun to count.

        Args:
            part: such as ``import``; further calls add to it.
            seconds: a share of the time since the last call, the rest of which the next call counts; None is all.
        """
        if self.counted_at is None:
            return
        if seconds is None:
            seconds = time.monotonic() - self.counted_at
        self.start[part] = self.start.get(part, 0.0) + seconds
        self.counted_at += seconds

    def take_start(self) -> dict[str, float]:
        """Return what :meth:`spent` counted, and count no further."""
        durations, self.start, self.counted_at = self.start, {}, None
        return durations

    def advance(self, phase: str | None = None, *, step: int | None = None) -> None:
        """Report one more piece of work; may be called from any thread. None keeps what was reported last."""
        self.count += 1
        if phase is not None:
            self.phase = phase
        if step is not None:
            self.step = step


PROGRESS = Progress()
"""Progress of this process."""


def process_age_s(pid: int | None = None) -> float:
    """Return the seconds since a process of this host was started, this one by default; 0 where the system does not
    show it."""
    fields = process_stat(os.getpid() if pid is None else pid)
    if not fields:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def process_stat(pid: int) -> list[str]:
    """Return what Linux shows of a process behind its name, its state first; nothing elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
