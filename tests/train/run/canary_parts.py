"""A logger that needs a token, and a callback that fails with it in its message."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nxdt_core.api import Callback, Component, ConfigFinding, Run, hookimpl
from nxdt_core.config.section import SecretText, Section
from nxdt_core.kernel.hookspecs import ValidateConfigContext


class BoardConfig(Section):
    """A logger at a server."""

    token: SecretText
    address: str = ""


class FailConfig(Section):
    """A callback that cannot log in."""

    password: SecretText
    at_step: int = 0


class Board(Callback):
    """Log into a file, as others log to a server; a digest of what was given shows that it was used."""

    def __init__(self, config: BoardConfig, run_dir: Path) -> None:
        given = repr([config.token.get_secret_value(), config.address])
        (run_dir / "used.txt").write_text(hashlib.sha256(given.encode()).hexdigest())
        self.path = run_dir / "board.jsonl"

    def on_fit_start(self, run: Run) -> None:
        """Keep the configuration as a logger would: with the references and masks of the written file."""
        (self.path.parent / "of_callbacks.json").write_text(json.dumps(run.config.to_dict()))

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


class Fail(Callback):
    """Raises what a client of a server might raise."""

    def __init__(self, config: FailConfig, run_dir: Path) -> None:
        self.config = config

    def on_fit_start(self, run: Run) -> None:
        if self.config.at_step:
            run.session.step = self.fail

    def fail(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"401: cannot log in with {self.config.password.get_secret_value()}")


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> list[ConfigFinding]:
    """Find a value that only the values show, and quote it."""
    token = context.config["exp_manager"]["loggers"][1]["token"]
    return [ConfigFinding(key="exp_manager", message=f"{token} is on a list")] if token.startswith("refused-") else []


@hookimpl
def nxdt_callbacks() -> list[Component]:
    return [
        Component(name="board", target=f"{__name__}:Board", config=f"{__name__}:BoardConfig"),
        Component(name="fail", target=f"{__name__}:Fail", config=f"{__name__}:FailConfig"),
    ]
