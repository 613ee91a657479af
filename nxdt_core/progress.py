"""What this process has got done so far, as evidence that it is not hung. Torch-free.

Long work reports each piece that it finishes: a training step, a batch of a validation, a block of a file. In a run of
many ranks the supervisor hears of it (:mod:`nxdt_core.launch.supervision.heartbeat`); elsewhere no process does, and
the reports cost an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROGRESS", "Progress"]


@dataclass(slots=True)
class Progress:
    """The newest piece of work of a process, and how many there were.

    Example::

        from nxdt_core.progress import PROGRESS

        for block in blocks:
            upload(block)
            PROGRESS.advance("upload to my store")
    """

    count: int = 0
    """Pieces of work done."""
    phase: str = "start"
    """What the newest one belongs to, such as ``validation``."""
    step: int = 0
    """Training steps that the run has done."""
    supervised: bool = False
    """Whether a supervisor watches this process and finds out which rank hangs. Collectives then wait longer than it
    does, so that it can report the rank that hangs, instead of torch the ranks that wait."""

    def advance(self, phase: str | None = None, *, step: int | None = None) -> None:
        """Report one more piece of work; may be called from any thread. None keeps what was reported last."""
        self.count += 1
        if phase is not None:
            self.phase = phase
        if step is not None:
            self.step = step


PROGRESS = Progress()
"""That of this process."""
