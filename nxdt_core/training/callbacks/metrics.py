"""Metrics: one device-to-host copy a logging step, then to ``metrics.jsonl``, the loggers and the console."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from nxdt_core.devices import max_memory_bytes, peak_flops, reset_max_memory
from nxdt_core.kernel import Kernel
from nxdt_core.nn.flops import TokenFlops
from nxdt_core.progress import PROGRESS
from nxdt_core.protocols.objective import traits_of
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.logger_tags import tag
from nxdt_core.training.callbacks.validation_figures import ValidationFigures, scalars, validated_all
from nxdt_core.training.data import UNNAMED
from nxdt_core.training.run.metric_files import FigureFiles
from nxdt_core.training.run.versions import versions_of

if TYPE_CHECKING:
    from nxdt_core.training.lightning.datamodule import NxdtDataModule
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["METRICS_FILE", "RESUMES_FILE", "VALIDATION_FILE", "MetricsWriter"]

_log = logging.getLogger(__name__)
_FAILED_LOGGER = "%s gets no more metrics, which %s still has: at step %d it failed with %s"

METRICS_FILE = "metrics.jsonl"
"""One JSON object per logged training step, each step once; see :mod:`nxdt_core.training.run.metric_files`."""
VALIDATION_FILE = "validation.jsonl"
"""One JSON object per validation."""
RESUMES_FILE = "resumes.jsonl"
"""One JSON object each time that the run resumed: the step, and when."""


class MetricsWriter(pl.Callback):
    """Writes the training metrics every ``every`` steps and the loss of each validation.

    The two files are the record of a run. Loggers get copies: one that fails gets no more rows, and a warning says so.

    Args:
        files: the run's, on the first rank.
        console: where a person reads along.
        every: steps between two rows.
        flops: operations per token, for the share of the devices' peak.
        compute_dtype: dtype of the matrix products, which decides the peak.
        parameter_norm: whether a row has the norm of the weights after the step, too.
        more: called for further columns of a row.
    """

    def __init__(
        self,
        files: FigureFiles,
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
        self._failed_loggers: set[int] = set()
        self._peak: float | None = None
        self._begun = self._waited = 0.0
        self._logged_step = self._logged_tokens = 0
        self._tokens_per_s: list[float] = []
        self._validation: ValidationFigures | None = None
        self._start: dict[str, float] = {}
        """Columns of the next row: what the time until the first step was spent on."""
        self.last: dict[str, Any] = {}
        """The newest row."""

    @property
    def typical_tokens_per_s(self) -> float | None:
        """Median over the logged intervals of this process, the first (warm-up) left out where there are more."""
        rows = sorted(self._tokens_per_s[1:] or self._tokens_per_s)
        return rows[len(rows) // 2] if rows else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Open the file and start the clocks."""
        device = pl_module.engine.device
        reset_max_memory(device)
        peak = peak_flops(device, self._compute_dtype)
        self._peak = None if peak is None else peak * pl_module.engine.rank_info.world_size
        state = pl_module.train_state
        pl_module.engine.ranks.on_rank_zero(lambda: self._files.begin(state.step, METRICS_FILE))
        self._logged_step, self._logged_tokens = state.step, state.consumed_tokens
        if pl_module.resumed is not None and trainer.is_global_zero:
            self._files.append(
                RESUMES_FILE, {"step": state.step, "at": datetime.now(UTC).isoformat(timespec="seconds")}
            )
            self._send(trainer, {"run_resumed": 1.0}, state.step)
        if trainer.is_global_zero:
            self._name_plugins(trainer, pl_module.config.kernel, state.step)
        self._console.begin(state.step)
        PROGRESS.spent("setup")
        self._waited, self._begun = self._wait(trainer), time.perf_counter()

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the time until the first batch as that of data."""
        if PROGRESS.start:
            PROGRESS.spent("data")

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row every ``every`` steps and at the end; after the first step, say what the start took."""
        if PROGRESS.start:
            self._say_start(pl_module)
        step = pl_module.train_state.step
        self._console.advance(step)
        if step % self._every == 0 or step == trainer.max_steps:
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Start new figures for this validation."""
        self._validation = ValidationFigures(traits_of(pl_module.objective).unit)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the loss on the device."""
        assert self._validation is not None
        self._validation.add(dataloader_idx, outputs)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Write the loss of the whole validation and of each set; its time is not the training's."""
        assert self._validation is not None
        data: NxdtDataModule | Any = getattr(trainer, "datamodule", None)
        found = self._validation.row(getattr(data, "validation_sets", (UNNAMED,)))
        if found and not trainer.sanity_checking and validated_all(trainer):
            row, unit = {"step": pl_module.train_state.step, **found}, traits_of(pl_module.objective).unit
            named = scalars(row, unit)
            for name, value in named.items():
                trainer.callback_metrics[name] = torch.tensor(math.nan if value is None else value)
            if trainer.is_global_zero:
                self._files.append(VALIDATION_FILE, row)
                self._send(trainer, named, pl_module.train_state.step)
                self._console.validation(row, unit)
        self._begun, self._waited = time.perf_counter(), self._wait(trainer)
        self._logged_step = pl_module.train_state.step
        self._logged_tokens = pl_module.train_state.consumed_tokens

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the metric files."""
        self._files.close()

    def _say_start(self, module: NxdtModule) -> None:
        float(module.last.loss.loss)  # the device has done the step, and not only been asked to
        PROGRESS.spent("first step")
        parts = PROGRESS.take_start()
        self._start = {f"start_{part.replace(' ', '_')}_s": seconds for part, seconds in parts.items()}
        named = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
        self._console.say(f"First step after {sum(parts.values()):.1f} s: {named}", self._start)

    def _log(self, trainer: pl.Trainer, module: NxdtModule) -> None:
        state, result = module.train_state, module.last
        skipped = torch.as_tensor(module.optimizer.skipped_steps, device=result.grad_norm.device)
        named = {"loss": result.loss.loss, "grad_norm": result.grad_norm, "skipped": skipped, **result.loss.metrics}
        if self._parameter_norm:
            named["parameter_norm"] = module.model.parameter_norm()
        values = torch.stack([value.detach().float() for value in named.values()]).tolist()  # the one copy
        now, waited = time.perf_counter(), self._wait(trainer)
        steps = max(1, state.step - self._logged_step)
        seconds = max(now - self._begun, 1e-9)
        tokens_per_s = (state.consumed_tokens - self._logged_tokens) / seconds
        self._tokens_per_s.append(tokens_per_s)
        scalars = dict(zip(named, values, strict=True))
        self.last = {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "loss": scalars.pop("loss"),
            "grad_norm": scalars.pop("grad_norm"),
            "skipped_steps": int(scalars.pop("skipped")),
            "lr": module.session.horizon.lr * result.lr_factor,
            "tokens_per_s": tokens_per_s,
            "mfu": None if self._peak is None else self._flops.strict * tokens_per_s / self._peak,
            "mfu_palm": None if self._peak is None else self._flops.palm * tokens_per_s / self._peak,
            "data_wait_s": (waited - self._waited) / steps,
            "step_time_s": seconds / steps,
            "max_memory_bytes": max_memory_bytes(module.engine.device),
            **scalars,
            **self._start,
            **self._more(),
        }
        self._start = {}
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in _numbers(self.last).items()})
        self._begun, self._waited = now, waited
        self._logged_step, self._logged_tokens = state.step, state.consumed_tokens
        if trainer.is_global_zero:
            self._files.append(METRICS_FILE, self.last)
            self._send(trainer, self.last, state.step)
            self._console.step(self.last)

    def _send(self, trainer: pl.Trainer, row: Mapping[str, Any], step: int) -> None:
        tagged = {tag(name): value for name, value in _numbers(row).items()}
        self._call_loggers(trainer, lambda logger: logger.log_metrics(tagged, step), step)

    def _name_plugins(self, trainer: pl.Trainer, kernel: Kernel, step: int) -> None:
        """Write the versions and the fingerprint of the plugins as a text to TensorBoard."""
        names = "".join(f"\n- {name} {version}" for name, version in sorted(versions_of(kernel).items()))
        text = f"fingerprint `{kernel.fingerprint()}`\n{names}"

        def write(logger: Logger) -> None:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("run/plugins", text, step)

        self._call_loggers(trainer, write, step)

    def _call_loggers(self, trainer: pl.Trainer, send: Callable[[Logger], None], step: int) -> None:
        for number, logger in enumerate(trainer.loggers):
            if number not in self._failed_loggers:
                try:
                    send(logger)
                except Exception as error:  # of any library
                    self._failed_loggers.add(number)
                    _log.warning(_FAILED_LOGGER, type(logger).__name__, METRICS_FILE, step, _reason(error))

    def _wait(self, trainer: pl.Trainer) -> float:
        data: NxdtDataModule | Any = getattr(trainer, "datamodule", None)
        loader = getattr(data, "train_loader", None)
        return 0.0 if loader is None else float(loader.waited_s)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key != "step" and value is not None}


def _reason(error: BaseException) -> str:
    """What a library met in the first place: TensorBoard's own sentence speaks of the value."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
