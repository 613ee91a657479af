"""The training loop of ``nxdt train``: a step, then the callbacks, then a validation where one is due."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from nxdt_core.callback import Run
from nxdt_core.protocols.parallel_model import StepLoss
from nxdt_core.system.progress import PROGRESS
from nxdt_core.train.data import UNNAMED
from nxdt_core.train.step import without_gradients

Metrics = dict[str, float | int | None]


def fit(run: Run) -> None:
    """Train from ``run.step`` until ``run.max_steps``, or until all ranks have agreed to stop. Collective."""
    session, trainer = run.session, run.config.run.trainer
    if trainer.num_sanity_val_steps and session.resumed is None:
        _evaluate(run, trainer.num_sanity_val_steps, seen=False)
    batches = iter(session.train_loader())
    PROGRESS.advance("training", step=run.step)
    run.call("on_fit_start")
    while run.step < run.max_steps and not run.stopping:
        waiting_since = time.perf_counter()
        batch = next(batches, None)
        run.waited_s += time.perf_counter() - waiting_since
        if batch is None:
            break
        if PROGRESS.start:
            PROGRESS.spent("data")
        run.last = session.step(batch, collect=False)
        PROGRESS.advance("training", step=run.step)
        run.call("on_step_end")
        if validates_after(run) and not run.stopping:
            validate(run)
        session.collections.after_step(run.step)
    if run.status == "running" or run.step >= run.max_steps:
        run.status = "finished"
    run.call("on_fit_end")


def validates_after(run: Run) -> bool:
    """Return whether a validation follows the step that is done."""
    trainer = run.config.run.trainer
    wanted = trainer.val_check_interval and trainer.limit_val_batches != 0
    return bool(wanted and run.session.data.validation_sets and run.step % (trainer.val_check_interval or 1) == 0)


def validate(run: Run) -> None:
    """Evaluate every validation set; what is found until a stop is dropped. Collective."""
    limit = run.config.run.trainer.limit_val_batches
    run.validation = _evaluate(run, limit if isinstance(limit, int) else None)
    PROGRESS.advance("training")
    if not run.stopping:
        run.call("on_validation_end")


def _evaluate(run: Run, limit: int | None, *, seen: bool = True) -> dict[str, Any]:
    """Return a row of metrics over the first ``limit`` global batches of each validation set; None and -1 take all.
    ``seen``: whether callbacks are called."""
    session, number = run.session, None if limit is None or limit < 0 else limit
    metrics = ValidationMetrics(session.objective.traits.unit)
    PROGRESS.advance("validation")
    with session.validated_weights(), without_gradients(inference=run.config.run.trainer.inference_mode):
        for index, loader in enumerate(session.validation_loaders()):
            for batch in islice(loader, number):
                metrics.add(index, session.evaluate_batch(batch))
                PROGRESS.advance("validation")
                if seen:
                    run.call("on_validation_batch_end")
                if run.stopping:
                    return {}
    return metrics.row(session.data.validation_sets)


class ValidationMetrics:
    """Adds up losses and metrics on the device, batch by batch.

    Args:
        unit: what the loss is a mean over; of ``tokens`` there is a perplexity, too.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._names: tuple[str, ...] = ()
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, number: int, loss: StepLoss) -> None:
        """Add a global batch of the ``number``-th set."""
        self._names = tuple(loss.metrics)
        values = torch.stack([loss.loss, *(loss.metrics[name].to(loss.loss) for name in self._names)]).double()
        weight = loss.weight.to(values)
        sums = torch.cat([weight.reshape(1), torch.where(weight > 0, values * weight, 0)])
        self._sums[number] = self._sums[number] + sums if number in self._sums else sums

    def row(self, sets: Sequence[str]) -> dict[str, Any]:
        """Means over the unit: of everything and, where ``sets`` have names, of each under ``sets``."""
        if not self._sums:
            return {}
        by_set = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))  # the one copy
        together = self._metrics([sum(column) for column in zip(*by_set.values(), strict=True)])
        if list(sets) == [UNNAMED]:
            return dict(together)
        return {**together, "sets": {sets[number]: self._metrics(sums) for number, sums in by_set.items()}}

    def _metrics(self, sums: Sequence[float]) -> Metrics:
        weight = sums[0]
        loss, *metrics = [value / weight if weight else None for value in sums[1:]]
        averages: Metrics = {"loss": loss, self._unit: int(weight)}
        if self._unit == "tokens":
            averages["perplexity"] = (
                None if loss is None else math.exp(min(loss, 700.0))
            )  # beyond, there is no such float
        return {**averages, **dict(zip(self._names, metrics, strict=True))}
