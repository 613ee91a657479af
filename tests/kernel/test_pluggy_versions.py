"""The kernel behaves the same on the oldest pluggy that it supports: its whole test-suite runs there as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

OLDEST = "1.5.0"
HERE = Path(__file__)
NOT_ABOUT_PLUGGY = {HERE.name, "test_import_directions.py"}
OTHERS = sorted(path for path in HERE.parent.glob("test_*.py") if path.name not in NOT_ABOUT_PLUGGY)


@pytest.fixture(scope="session")
def oldest_pluggy(tmp_path_factory) -> dict[str, str]:
    """Environment of a child process in which the oldest pluggy comes first."""
    target = tmp_path_factory.mktemp("pluggy")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--target", str(target), f"pluggy=={OLDEST}"], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        pytest.skip(f"pip could not fetch pluggy {OLDEST}: {result.stderr.strip().splitlines()[-1:]}")
    return {**os.environ, "PYTHONPATH": str(target)}


@pytest.mark.slow
def test_the_kernel_tests_pass_on_the_oldest_supported_pluggy(oldest_pluggy):
    shown = [sys.executable, "-c", "import pluggy; print(pluggy.__version__)"]
    version = subprocess.run(shown, env=oldest_pluggy, capture_output=True, text=True, check=True).stdout.strip()
    assert version == OLDEST != pluggy.__version__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, OTHERS)]
    result = subprocess.run(
        command, env=oldest_pluggy, cwd=HERE.parents[2], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
