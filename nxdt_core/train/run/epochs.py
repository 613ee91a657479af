"""Settings that count passes over the training data, as steps: the loop counts nothing else."""

from __future__ import annotations

from dataclasses import replace

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.training import LengthUnknown

__all__ = ["counts_passes", "in_steps"]


def counts_passes(config: ResolvedConfig) -> bool:
    """Return whether a setting of the run is given in passes over the data."""
    trainer, saves = config.run.trainer, config.run.checkpoint.every_n_epochs
    passes = (trainer.max_epochs, trainer.min_epochs, trainer.check_val_every_n_epoch, saves)
    return any(count is not None and count > 0 for count in passes)


def in_steps(config: ResolvedConfig, samples: int | None) -> ResolvedConfig:
    """Return the configuration with ``max_epochs``, ``min_epochs``, ``check_val_every_n_epoch`` and ``every_n_epochs``
    as steps.

    Passes follow each other without a gap, so that one may end within a step; n passes are the whole steps in them.

    Args:
        config: of the run.
        samples: in the training data; None where they do not know.

    Raises:
        LengthUnknown: a setting counts passes over such data.
    """
    run, trainer = config.run, config.run.trainer

    def steps(key: str, passes: int | None) -> int | None:
        if passes is None or passes < 1:
            return None
        if samples is None:
            raise LengthUnknown(key=key)
        return max(1, passes * samples // run.data.global_batch_size)

    end = steps("trainer.max_epochs", trainer.max_epochs)
    last = trainer.max_steps if end is None else min(end, trainer.max_steps)
    least = steps("trainer.min_epochs", trainer.min_epochs)
    validation = steps("trainer.check_val_every_n_epoch", trainer.check_val_every_n_epoch)
    save = steps("checkpoint.every_n_epochs", run.checkpoint.every_n_epochs)
    sched = run.model.optim.sched
    if sched.max_steps == trainer.max_steps:
        sched = replace(sched, max_steps=last)
    return replace(
        config,
        run=replace(
            run,
            trainer=replace(
                trainer,
                max_steps=last,
                min_steps=max(trainer.min_steps or 0, least or 0),
                val_check_interval=validation or trainer.val_check_interval,
            ),
            checkpoint=replace(run.checkpoint, every_n_train_steps=save or run.checkpoint.every_n_train_steps),
            model=replace(run.model, optim=replace(run.model.optim, sched=sched)),
        ),
    )
