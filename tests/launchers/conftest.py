"""Commands in the test's directory, and metrics of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nxdt_core.cli import main
from tests.training.launch.launching import UNSET


@pytest.fixture
def nxdt(tmp_path, capfd):
    """Run ``nxdt ARGS`` in this process and in the test's directory."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name in UNSET:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["nxdt", *words])
            status = main([*words])
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def metric_rows():
    """Read a run's metrics; the last row of a step counts."""

    def read(run_dir):
        rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in rows}

    return read
