"""One process on the device of torch-xla, whose client for the CPU runs here: graphs as on an accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)
PROGRAM = Path(__file__).with_name("lazy_device_run.py")


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_it_trains_and_resumes_as_the_torch_engine_does_with_few_compilations(model: str) -> None:
    """The device belongs to the process, so that another one runs it."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), model],
        env={**os.environ, "NXD_CPU_MODE": "0", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).partition(" ")[2])
    assert found["device"].startswith("xla")
    expected = found["expected"]
    assert found["losses"][: len(expected)] == pytest.approx(expected, abs=1e-6)
    assert found["losses"][-1] < found["losses"][0] - 1
    assert found["compilations"] <= 3
    assert found["values read in the steps"] == 0
    assert found["fixed shapes"]
    assert found["resumed"] == found["losses"][2:4]
