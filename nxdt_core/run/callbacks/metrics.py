"""Metrics of training steps and of validations: computed, averaged over what was trained, and logged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, final

import torch

from nxdt_core.callback import Callback, Run
from nxdt_core.distributed.devices import max_memory_bytes, peak_flops, reset_max_memory
from nxdt_core.models.token_flops import TokenFlops
from nxdt_core.run.callbacks.console import Console
from nxdt_core.run.metric_files import MetricFiles
from nxdt_core.system.progress import PROGRESS
from nxdt_core.train.state import versions_of

__all__ = ["METRICS_FILE", "RESUMES_FILE", "VALIDATION_FILE", "MetricsWriter", "scalars"]

_log = logging.getLogger(__name__)

Metrics = dict[str, float | int | None]


def scalars(row: Mapping[str, Any], unit: str, stage: str = "val") -> dict[str, float | None]:
    """Return the metrics of a row under the names that loggers have for them: ``val_loss``, ``val_loss/<set>``, …"""
    found: dict[str, float | None] = {}
    for suffix, values in (("", row), *((f"/{name}", part) for name, part in row.get("sets", {}).items())):
        named = {key: value for key, value in values.items() if key not in ("step", "sets", unit)}
        found |= {f"{stage}_{key}{suffix}": value for key, value in named.items()}
    return found


METRICS_FILE = "metrics.jsonl"
"""One JSON object per logged training step, each step once; see :mod:`nxdt_core.run.metric_files`."""
VALIDATION_FILE = "validation.jsonl"
"""One JSON object per validation."""
RESUMES_FILE = "resumes.jsonl"
"""One JSON object each time that the run resumed: the step, and when."""


@final
class MetricsWriter(Callback):
    """Writes the training metrics every ``every`` steps and the loss of each validation.

    The two files are the record of a run; loggers get copies.

    Args:
        files: the run's, on the first rank.
        console: prints lines for the user.
        every: steps between two rows.
        flops: operations per token, for the share of the devices' peak.
        compute_dtype: dtype of the matrix products, which decides the peak.
        parameter_norm: whether a row has the norm of the weights after the step, too.
        more: called for further columns of a row.
    """

    def __init__(
        self,
        files: MetricFiles,
        console: Console,
        *,
        every: int,
        flops: TokenFlops,
        compute_dtype: str,
        parameter_norm: bool = False,
        more: Callable[[], Mapping[str, float | int | None]] = dict,
    ) -> None:
        self._files = files
        self._console = console
        self._every = max(1, every)
        self._flops = flops
        self._compute_dtype = compute_dtype
        self._parameter_norm = parameter_norm
        self._more = more
        self._peak: float | None = None
        self._begun = self._waited = 0.0
        self._logged_step = self._logged_tokens = 0
        self._tokens_per_s: list[float] = []
        self._weightless: torch.Tensor | int = 0
        """Steps of this process without a label with a weight; on the device, and read for a row alone."""
        self._warned = False
        self._start: dict[str, float] = {}
        """Columns of the next row: what the time until the first step was spent on."""
        self.last: dict[str, Any] = {}
        """The newest row."""

    @property
    def typical_tokens_per_s(self) -> float | None:
        """Median over the logged intervals of this process, the first (warm-up) left out where there are more."""
        rows = sorted(self._tokens_per_s[1:] or self._tokens_per_s)
        return rows[len(rows) // 2] if rows else None

    def on_fit_start(self, run: Run) -> None:
        """Open the file and start the clocks."""
        session = run.session
        device, ranks = session.engine.device, session.engine.ranks
        reset_max_memory(device)
        # A tensor from the start, so that a lazy device records the same sum at each step.
        self._weightless = torch.zeros((), dtype=torch.int64, device=device)
        peak = peak_flops(device, self._compute_dtype)
        self._peak = None if peak is None else peak * ranks.world_size
        ranks.on_rank_zero(lambda: self._files.begin(run.step, METRICS_FILE))
        if run.rank == 0:
            if session.resumed is not None:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                self._files.append(RESUMES_FILE, {"step": run.step, "at": now})
                run.log({"run_resumed": 1.0})
            versions = sorted(versions_of(run.config.kernel).items())
            run.log_text("run/plugins", "\n".join(f"- {name} {version}" for name, version in versions))
        self._console.begin(run.step)
        PROGRESS.spent("setup")
        self._restart(run)

    def on_step_end(self, run: Run) -> None:
        """Write a row every ``every`` steps and at the end; after the first step, say what the start took."""
        if PROGRESS.start:
            assert run.last is not None
            float(run.last.loss.loss)  # the device has done the step, and not only been asked to
            PROGRESS.spent("first step")
            parts = PROGRESS.take_start()
            self._start = {f"start_{part.replace(' ', '_')}_s": seconds for part, seconds in parts.items()}
            named = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
            self._console.say(f"First step after {sum(parts.values()):.1f} s: {named}", self._start)
        self._console.advance(run.step)
        if run.last is not None:
            self._weightless = self._weightless + (run.last.loss.weight == 0)
        if run.step % self._every == 0 or run.step == run.max_steps:
            self._log(run)

    def on_validation_end(self, run: Run) -> None:
        """Write the loss of the whole validation and of each set; its time is not the training's."""
        unit = run.session.objective.traits.unit
        if run.validation:
            row, named = {"step": run.step, **run.validation}, scalars(run.validation, unit)
            if run.rank == 0:
                self._files.append(VALIDATION_FILE, row)
                self._console.validation(row, unit)
            run.metrics.update(dict.fromkeys(named, math.nan))
            run.log({name: value for name, value in named.items() if value is not None})
        self._restart(run)

    def on_fit_end(self, run: Run) -> None:
        """Write a row of the last step, where the run stops between two rows."""
        if run.last is not None and run.step != self._logged_step:
            self._log(run)

    def close(self, run: Run) -> None:
        """Close the metric files."""
        self._files.close()

    def _restart(self, run: Run) -> None:
        """Leave out what happened since the last row."""
        self._begun, self._waited = time.perf_counter(), run.waited_s
        self._logged_step, self._logged_tokens = run.step, run.session.state.consumed_tokens

    def _log(self, run: Run) -> None:
        session, state, result = run.session, run.session.state, run.last
        assert result is not None
        skipped = torch.as_tensor(session.optimizer.skipped_steps, device=result.grad_norm.device)
        weightless = torch.as_tensor(self._weightless, device=result.grad_norm.device)
        named = {"loss": result.loss.loss, "grad_norm": result.grad_norm, "skipped": skipped, "weightless": weightless}
        named |= result.loss.metrics
        if self._parameter_norm:
            named["parameter_norm"] = session.model.parameter_norm()
        values = torch.stack([value.detach().float() for value in named.values()]).tolist()  # the one copy
        steps = max(1, state.step - self._logged_step)
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        tokens_per_s = (state.consumed_tokens - self._logged_tokens) / seconds
        self._tokens_per_s.append(tokens_per_s)
        scalars = dict(zip(named, values, strict=True))
        if (count := scalars.pop("weightless")) and run.rank == 0 and not self._warned:
            self._warned = True
            _log.warning(
                "global batches without a label with a weight, up to step %d: %d. Their loss is 0, and the optimizer"
                " still applies momentum and weight decay",
                state.step,
                count,
            )
        self.last = {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "loss": scalars.pop("loss"),
            "grad_norm": scalars.pop("grad_norm"),
            "skipped_steps": int(scalars.pop("skipped")),
            "lr": session.horizon.lr * result.lr_factor,
            "tokens_per_s": tokens_per_s,
            "mfu": None if self._peak is None else self._flops.strict * tokens_per_s / self._peak,
            "mfu_palm": None if self._peak is None else self._flops.palm * tokens_per_s / self._peak,
            "data_wait_s": (run.waited_s - self._waited) / steps,
            "step_time_s": seconds / steps,
            "max_memory_bytes": max_memory_bytes(session.engine.device),
            **scalars,
            **self._start,
            **self._more(),
        }
        self._start = {}
        self._restart(run)
        if run.rank == 0:
            self._files.append(METRICS_FILE, self.last)
            self._console.step(self.last)
        run.log({key: float(value) for key, value in self.last.items() if key != "step" and value is not None})
