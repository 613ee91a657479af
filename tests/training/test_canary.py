"""A canary in the environment and in secret fields: no file of a run and no output holds it."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path

import pytest

from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors import ConfigError
from tests.training.small import SMALL

CANARY = "canary-4711-value"
PARTS = Path(__file__).parent / "canary_parts.py"
LOGGERS = "exp_manager.loggers=[tensorboard,{{name: board, token: '{token}', address: '{address}'}}]"
CALLBACKS = "trainer.callbacks=[{{name: fail, password: '{password}', at_step: {step}}}]"
OFFERED = "https://user:${oc.env:NXDT_CANARY}@host"


@pytest.fixture
def nxdt(tmp_path, capfd, monkeypatch):
    """Run ``nxdt`` in this process; returns status and all that it printed."""
    monkeypatch.setenv("NXDT_CANARY", CANARY)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["nxdt", *words])
        try:
            status = main(list(words))
        except RuntimeError as error:  # a bug's traceback is Python's own
            status, text = 1, str(error)
            return status, "".join([*capfd.readouterr(), text])
        return status, "".join(capfd.readouterr())

    return run


def overrides(tmp_path, *, token, step=0):
    """A run of two steps with a secret in a reference, in a longer text, and in a secret field."""
    return [
        *SMALL,
        "name=run",
        "trainer.max_steps=2",
        "checkpoint.every_n_train_steps=1" if False else "checkpoint.save_top_k=2",
        f"exp_manager.exp_dir={tmp_path}",
        f"plugins.local=['{PARTS}']",
        LOGGERS.format(token=token, address=OFFERED),
        CALLBACKS.format(password=CANARY, step=step),
    ]


def files_with_the_canary(directory):
    """Names of files below it that hold the canary, plain, reversed in base64, or compressed."""
    forms = [CANARY.encode(), base64.b64encode(CANARY.encode()).rstrip(b"=")[:-1]]
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            content += gzip.decompress(content) if content[:2] == b"\x1f\x8b" else b""
            found += [str(path)] if any(form in content for form in forms) else []
    return found
