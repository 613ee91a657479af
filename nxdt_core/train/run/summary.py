"""The summary of a run: the last metrics, the checkpoint's address, the command to resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from nxdt_core.train.callbacks.console import human

__all__ = ["RunSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Result of :func:`nxdt_core.train.run.train`."""

    step: int
    max_steps: int
    loss: float | None
    """Loss of the last step; None where no step was trained."""
    consumed_tokens: int
    tokens_per_s: float | None
    """Median over the logged intervals; None where no step was trained."""
    run_dir: Path
    checkpoint: str | None
    """URI of the newest checkpoint."""
    resume_command: str | None
    """Command that resumes the run, or that starts the run itself after a trial; None without a checkpoint."""
    exit_status: int = 0
    """128 + the signal's number after a signal, as shells count."""

    def to_dict(self) -> dict[str, object]:
        """Return what ``nxdt train --json`` prints; keys are only ever added."""
        return {
            "step": self.step,
            "max_steps": self.max_steps,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "consumed_tokens": self.consumed_tokens,
            "tokens_per_s": self.tokens_per_s,
            "run_dir": str(self.run_dir),
            "checkpoint": self.checkpoint,
            "resume_command": self.resume_command,
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        rows = [("steps", f"{self.step} of {self.max_steps}")]
        if self.loss is not None:
            rows.append(("loss", f"{self.loss:.4f}"))
        rows.append(("tokens", f"{self.consumed_tokens:,}"))
        if self.tokens_per_s is not None:
            rows.append(("tokens/s", human(self.tokens_per_s)))
        rows += [
            ("run", str(self.run_dir)),
            ("checkpoint", self.checkpoint or "none"),
        ]
        if self.resume_command is not None:
            rows.append(("resume", self.resume_command))
        return "\n".join(f"{name + ':':<12}{value}" for name, value in rows)
