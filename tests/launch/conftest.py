"""Commands in the test's directory, and small runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nxdt_core.cli import main
from tests.launch.launching import UNSET
from tests.train.conftest import metric_rows, small_run, weights  # noqa: F401


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
