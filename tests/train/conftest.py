"""Small real runs: the Llama plugin on the shipped text, in a few steps."""

import json
from pathlib import Path

import pytest

from nxdt_core.config import load
from nxdt_core.system.progress import PROGRESS
from tests.train.small import SMALL


@pytest.fixture
def small_run(tmp_path):
    """Load the tiny recipe, smaller still, with its runs below the test's directory."""

    PROGRESS.take_start()  # of a command of another test, which has not reached its first step

    def make(*overrides, name="run", exp_dir=None):
        where = (f"exp_manager.exp_dir={exp_dir or tmp_path}", f"name={name}")
        return load("recipe:llama-tiny", [*SMALL, *where, *overrides])

    return make


@pytest.fixture(scope="session")
def metric_rows():
    """Read a run's metrics; the last row of a step counts."""

    def read(run_dir, file="metrics.jsonl"):
        rows = [json.loads(line) for line in (Path(run_dir) / file).read_text(encoding="utf-8").splitlines()]
        return {row["step"]: row for row in rows}

    return read


@pytest.fixture(scope="session")
def weights():
    """All tensors of a run's newest checkpoint, optimizer state included."""

    def read(config):
        from nxdt_core import checkpoint
        from nxdt_core.train import build

        store = build.storage(config)
        manifest = checkpoint.latest(store, warn=print)
        return {
            **checkpoint.load_model(store, manifest),
            **{f"optim/{k}": v for k, v in checkpoint.load_optimizer(store, manifest).items()},
        }

    return read
