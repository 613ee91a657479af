"""A logger that needs a token, and a callback that fails with it in its message."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger

from nxdt_core.api import CallbackComponent, ConfigFinding, LoggerComponent, hookimpl
from nxdt_core.config.annotations import SecretText
from nxdt_core.kernel.contexts import FitContext, ValidateConfigContext


@dataclass(frozen=True, kw_only=True)
class BoardConfig:
    """A logger at a server."""

    token: SecretText = field(repr=False)
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class FailConfig:
    """A callback that cannot log in."""

    password: SecretText = field(repr=False)
    at_step: int = 0


def board(config: BoardConfig, run_dir: Path) -> CSVLogger:
    """Log into a CSV file, as others log to a server; a digest of what was given shows that it was used."""
    given = repr([config.token, config.address])
    (run_dir / "used.txt").write_text(hashlib.sha256(given.encode()).hexdigest())
    return CSVLogger(save_dir=str(run_dir), name="board", version="")


class Fail(Callback):
    """Raises what a client of a server might raise."""

    def __init__(self, config: FailConfig, run_dir: Path) -> None:
        self.config = config

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.config.at_step and trainer.global_step >= self.config.at_step:
            raise RuntimeError(f"401: cannot log in with {self.config.password}")


@hookimpl
def nxdt_loggers() -> list[LoggerComponent]:
    return [LoggerComponent(name="board", target=f"{__name__}:board", config=f"{__name__}:BoardConfig")]


@hookimpl
def nxdt_fit_start(context: FitContext) -> None:
    """Keep what hooks receive: the references and masks of the written file."""
    (context.run_dir / "of_hooks.json").write_text(json.dumps(context.config))


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> list[ConfigFinding]:
    """Find a value that only the values show, and quote it."""
    token = context.config["exp_manager"]["loggers"][1]["token"]
    return [ConfigFinding(key="exp_manager", message=f"{token} is on a list")] if token.startswith("refused-") else []


@hookimpl
def nxdt_callbacks() -> list[CallbackComponent]:
    return [CallbackComponent(name="fail", target=f"{__name__}:Fail", config=f"{__name__}:FailConfig")]
