"""The training loop of ``nxdt train``: a step, then the callbacks, then a validation where one is due."""

from __future__ import annotations

from itertools import islice
from typing import Any

from nxdt_core.callback import Run
from nxdt_core.protocols.objective import traits_of
from nxdt_core.system.progress import PROGRESS
from nxdt_core.train.callbacks.metrics import ValidationMetrics
from nxdt_core.train.session import without_gradients


def fit(run: Run) -> None:
    """Train from ``run.step`` until ``run.max_steps``, or until all ranks have agreed to stop. Collective."""
    session, trainer = run.session, run.config.run.trainer
    if trainer.num_sanity_val_steps and session.resumed is None:
        _evaluate(run, trainer.num_sanity_val_steps, seen=False)
    loader = session.train_loader()
    PROGRESS.advance("training", step=run.step)
    run.call("on_fit_start")
    batches = iter(loader)
    while run.step < run.max_steps and not run.stopping:
        batch = next(batches, None)
        if batch is None:
            break
        run.waited_s = loader.waited_s
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
    metrics = ValidationMetrics(traits_of(session.objective).unit)
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
