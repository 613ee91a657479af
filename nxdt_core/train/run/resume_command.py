"""The command that resumes a run, as a person would type it."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from nxdt_core.config import ResolvedConfig
from nxdt_core.config.secrets.command_line import shown_words

__all__ = ["resume_command"]

_RESUME = "checkpoint.resume_if_exists"


def resume_command(config: ResolvedConfig, step: int) -> str:
    """Return the command that resumes the run, with a later end if the run has reached its end; for a trial, the
    command of the run itself."""
    overrides = {word.partition("=")[0]: word for word in config.overrides}
    manager, trainer = config.run.exp_manager, config.run.trainer

    def override(key: str, value: object) -> None:
        overrides[key] = f"{key}={value}"

    if trainer.fast_dev_run:
        override("trainer.fast_dev_run", "false")
    else:
        if manager.use_datetime_version and manager.version is not None:
            override("exp_manager.version", manager.version)
        if not config.run.checkpoint.resume_if_exists:
            overrides.pop(_RESUME, None)  # it comes last
            override(_RESUME, "true")
        if step >= trainer.max_steps:
            _move_end(config, step, override)
    return shlex.join(["nxdt", "train", config.source, *shown_words(config, overrides.values())])


def _move_end(config: ResolvedConfig, step: int, override: Callable[[str, object], None]) -> None:
    passes, asked = config.run.trainer.max_epochs, config.tree.plain("trainer.max_steps")
    if passes is not None and passes > 0 and isinstance(asked, int) and step < asked:
        override("trainer.max_epochs", 2 * passes)
    else:
        override("trainer.max_steps", 2 * step)
