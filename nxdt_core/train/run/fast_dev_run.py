"""``trainer.fast_dev_run``: a few steps that leave the run itself alone."""

from __future__ import annotations

from dataclasses import replace

from nxdt_core.config import ResolvedConfig

__all__ = ["as_trial"]


def as_trial(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of the trial where it asks for one, else itself. Learning rates are those of the run."""
    run, steps = config.run, int(config.run.trainer.fast_dev_run)
    if not steps:
        return config
    return replace(
        config,
        run=replace(
            run,
            trainer=replace(
                run.trainer,
                max_steps=steps,
                max_epochs=-1,
                val_check_interval=steps,
                check_val_every_n_epoch=None,
                limit_val_batches=steps,
                num_sanity_val_steps=0,
                log_every_n_steps=1,
            ),
            checkpoint=replace(run.checkpoint, enabled=False, resume_if_exists=False),
            exp_manager=replace(run.exp_manager, create_early_stopping_callback=False),
        ),
        loggers=(),
        run_dir=config.run_dir / "fast_dev_run",
    )
