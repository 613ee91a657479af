"""Commands in the test's directory, and metrics of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.training.launch.launching import UNSET


@pytest.fixture
def nxdt(tmp_path):
    """Run ``nxdt ARGS`` in the test's directory."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        return processes.run(
            [sys.executable, "-m", "nxdt_core", *words],
            cwd=tmp_path,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def metric_rows():
    """Read a run's metrics; the last row of a step counts."""

    def read(run_dir):
        rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in rows}

    return read
