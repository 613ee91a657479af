"""Metrics of training steps and of validations: computed, averaged over what was trained, and logged."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, final

import torch
from torch import nn

from nxdt_core.callback import Callback, Run
from nxdt_core.distributed.devices import meta_device, peak_flops, profile_of
from nxdt_core.errors.base import NxdtError
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.run.log import Console, strict_json
from nxdt_core.run.metric_rows import json_object
from nxdt_core.system.progress import PROGRESS
from nxdt_core.system.regular_files import regular_opener, replacing
from nxdt_core.train.build import cannot_write
from nxdt_core.train.state import versions_of

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""One JSON object per logged training step, each step once."""
VALIDATION_FILE = "validation.jsonl"
"""One JSON object per validation."""
RESUMES_FILE = "resumes.jsonl"
"""One JSON object each time that the run resumed: the step, and when."""
_ASIDE = ".replaced.jsonl"
_NODES = 4096
"""Positions at which the cost of a token is asked for; it is taken as linear between them."""


def scalars(row: Mapping[str, Any], unit: str, stage: str = "val") -> dict[str, float | None]:
    """Return the metrics of a row under the names that loggers have for them: ``val_loss``, ``val_loss/<set>``, …"""
    metrics: dict[str, float | None] = {}
    for suffix, values in (("", row), *((f"/{name}", part) for name, part in row.get("sets", {}).items())):
        named = {key: value for key, value in values.items() if key not in ("step", "sets", unit)}
        metrics |= {f"{stage}_{key}{suffix}": value for key, value in named.items()}
    return metrics


@final
class MetricFiles:
    """Appends rows to the metric files of a run; a run that cannot write one of them is not worth continuing.

    A run that resumes repeats the steps that a crash lost, and one that starts from step 0 in a used directory repeats
    all of them. Rows of steps that are about to be repeated move to a separate file: none is lost, and a reader of
    the metrics sees each step once.

    Args:
        run_dir: directory of the files; None writes nothing.
        fail: called with the error when a row cannot be written. That file gets no more rows.
    """

    def __init__(self, run_dir: Path | None, fail: Callable[[NxdtError], None]) -> None:
        self._run_dir = run_dir
        self._fail = fail
        self._failed: set[str] = set()
        self._files: dict[str, TextIO] = {}

    def begin(self, step: int, name: str) -> None:
        """Set the rows of steps after ``step`` aside, and open the file ``name``.

        Those rows, and a last row that a crash cut short, move to ``<name>.replaced.jsonl``. Files whose rows have no
        ``step`` are left as they are.

        Raises:
            CannotWriteRunDirectory: the directory cannot be written.
        """
        if self._run_dir is None:
            return
        try:
            for path in sorted(self._run_dir.glob("*.jsonl")):
                if path.name.endswith(_ASIDE):
                    continue
                with open(path, encoding="utf-8", errors="replace", newline="\n", opener=regular_opener) as rows:
                    if _step(rows.readline()) is None:
                        continue
                    rows.seek(0)
                    earlier, later = list[str](), list[str]()
                    for row in rows:
                        done = _step(row)
                        (earlier if done is not None and done <= step else later).append(row.rstrip("\n") + "\n")
                if not later:
                    continue
                aside = path.with_name(path.name.removesuffix(".jsonl") + _ASIDE)
                with open(aside, "a", encoding="utf-8", newline="\n", opener=regular_opener) as file:
                    file.writelines(later)
                    file.flush()
                    os.fsync(file.fileno())
                with replacing(path) as whole:
                    whole.write("".join(earlier).encode("utf-8"))
                    whole.flush()
                    os.fsync(whole.fileno())
            self._open(self._run_dir, name)
        except OSError as error:
            raise cannot_write(self._run_dir, error) from error

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row to the file ``name``, through to the operating system."""
        if self._run_dir is None or name in self._failed:
            return
        try:
            file = self._open(self._run_dir, name)
            file.write(strict_json(row) + "\n")
            file.flush()
        except OSError as error:
            self._failed.add(name)
            self._fail(cannot_write(self._run_dir, error))

    def close(self) -> None:
        """Close all metric files."""
        for file in self._files.values():
            with suppress(OSError):  # what could not be written was reported already
                file.close()
        self._files.clear()

    def _open(self, run_dir: Path, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = open(run_dir / name, "a", encoding="utf-8", opener=regular_opener)  # noqa: SIM115
        return self._files[name]


def _step(row: str) -> int | None:
    """The step of a whole row; None where there is none."""
    if not row.endswith("\n"):
        return None
    step = json_object(row).get("step")
    return step if type(step) is int else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Operations of the forward and backward pass of one token, without recomputation."""

    strict: float
    """Operations that mathematics needs: attention to earlier positions only, and no gradients of frozen weights."""
    palm: float
    """Convention of PaLM (arXiv:2204.02311, appendix B): attention to all positions, every weight trained."""


def token_flops(builder: ModelBuilder, sequence_length: int, adapters: Sequence[Adapter] = ()) -> TokenFlops:
    """Return the operations per token of a model that trains on full sequences, averaged over their positions.

    A weight that a token is multiplied with costs 6 operations where it trains, and 4 where it is frozen: forward, and
    the gradient of its input. The boundaries of packed documents are not known here, so they are not considered.

    Args:
        builder: of the model; :meth:`~nxdt_core.protocols.model.ModelBuilder.flops_per_token` is in PaLM's convention.
        sequence_length: positions per sequence.
        adapters: what changes and freezes the model before training.
    """
    # The mean over all positions of the cost of a token that sees itself and what precedes it.
    steps = min(_NODES, sequence_length)
    last, low = 1, builder.flops_per_token(1)
    total = low
    for index in range(1, steps):
        first, last = last, 1 + (sequence_length - 1) * index // max(1, steps - 1)
        high = builder.flops_per_token(last)
        total += (last - first) * (low + high) / 2 + (high - low) / 2  # the sum of a line over first + 1 … last
        low = high
    strict = total / sequence_length
    if adapters:
        with meta_device():
            module, plan = builder.build(), builder.plan()
            before = {id(weight) for weight in _multiplied(module)}
            for adapter in adapters:
                plan = adapter.apply(module, plan)
        base = added = frozen = 0
        for weight in _multiplied(module):
            size = weight.numel()
            if id(weight) in before:
                base, frozen = base + size, frozen + size * (not weight.requires_grad)
            else:
                added += size
        one, two = builder.flops_per_token(1), builder.flops_per_token(2)
        strict += 6.0 * added - (2 * one - two) * (frozen / max(1, base)) / 3
    return TokenFlops(strict=strict, palm=builder.flops_per_token(sequence_length))


def _multiplied(module: nn.Module) -> list[nn.Parameter]:
    """Weights that tokens are multiplied with; rows of an embedding are looked up."""
    weights = {
        id(weight): weight
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
        if weight.ndim > 1
    }
    return list(weights.values())


@final
class MetricsWriter(Callback):
    """Writes the training metrics every ``trainer.log_every_n_steps`` steps and the loss of each validation.

    The two files are the record of a run; loggers get copies.

    Args:
        files: the run's, on the first rank.
        console: prints lines for the user.
        flops: operations per token, for the share of the devices' peak.
        compute_dtype: dtype of the matrix products, which decides the peak.
        more: called for further columns of a row.
    """

    def __init__(
        self,
        files: MetricFiles,
        console: Console,
        *,
        flops: TokenFlops,
        compute_dtype: str,
        more: Callable[[], Mapping[str, float | int | None]] = dict,
    ) -> None:
        self._files = files
        self._console = console
        self._flops = flops
        self._compute_dtype = compute_dtype
        self._more = more
        self._peak: float | None = None
        self._begun = self._waited = 0.0
        self._logged_step = self._logged_tokens = 0
        self.rates: list[float] = []
        """Tokens per second of each logged interval of this process."""
        self._weightless: torch.Tensor | int = 0
        """Steps of this process without a label with a weight; on the device, and read for a row alone."""
        self._warned = False
        self._start: dict[str, float] = {}
        """Columns of the next row: what the time until the first step was spent on."""
        self.last: dict[str, Any] = {}
        """The newest row."""

    def on_fit_start(self, run: Run) -> None:
        """Open the file and start the clocks."""
        session = run.session
        device, ranks = session.engine.device, session.engine.ranks
        profile_of(device).operations.reset_max_memory(device)
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
        """Write a row where one is due and at the end; after the first step, say what the start took."""
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
        if run.step % run.config.run.trainer.log_every_n_steps == 0 or run.step == run.max_steps:
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
        if run.config.run.exp_manager.log_parameter_norm:
            named["parameter_norm"] = session.model.parameter_norm()
        values = torch.stack([value.detach().float() for value in named.values()]).tolist()  # the one copy
        steps = max(1, state.step - self._logged_step)
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        tokens_per_s = (state.consumed_tokens - self._logged_tokens) / seconds
        self.rates.append(tokens_per_s)
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
            "lr": run.config.run.model.optim.lr * result.lr_factor,
            "tokens_per_s": tokens_per_s,
            "mfu": None if self._peak is None else self._flops.strict * tokens_per_s / self._peak,
            "mfu_palm": None if self._peak is None else self._flops.palm * tokens_per_s / self._peak,
            "data_wait_s": (run.waited_s - self._waited) / steps,
            "step_time_s": seconds / steps,
            "max_memory_bytes": profile_of(session.engine.device).operations.max_memory_bytes(session.engine.device),
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
