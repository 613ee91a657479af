"""A library that is missing, a placeholder, broken or of another version is refused before anything is built."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests import processes

WRONG = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'
XLA = {"torch_xla/__init__.py": ""}
NXD = {"neuronx_distributed/__init__.py": ""}


def metadata(package: str, version: str) -> dict[str, str]:
    name = package.replace("-", "_")
    return {f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"}


CASES = {
    "no torch-xla": (
        {},
        "NXDT-N001",
        ["needs torch-xla", "pip.repos.neuron.amazonaws.com", "parallel_engine.name=torch"],
    ),
    "no library": (XLA, "NXDT-N001", ["needs neuronx-distributed"]),
    # The wheel on PyPI has a folder with a hyphen, which no program can import.
    "placeholder": ({**XLA, **metadata("neuronx-distributed", "0.1")}, "NXDT-N002", ["neuronx-distributed is PyPI's"]),
    "placeholder beneath": (
        {**XLA, "neuronx_distributed/__init__.py": "import torch_neuronx\n", "torch_neuronx/__init__.py": WRONG},
        "NXDT-N002",
        ["torch-neuronx is PyPI's", "pip uninstall torch-neuronx"],
    ),
    "missing beneath": (
        {**XLA, "neuronx_distributed/__init__.py": "import torch_neuronx\n"},
        "NXDT-N001",
        ["torch-neuronx"],
    ),
    "broken": (
        {**XLA, "neuronx_distributed/__init__.py": "from transformers.utils.nowhere import HFTracer\n"},
        "NXDT-N003",
        ["transformers.utils.nowhere", "older than 5"],
    ),
    "another torch": ({**XLA, **NXD, **metadata("torch-xla", "2.4.0")}, "NXDT-N004", ["torch-xla 2.4.0", "2.31"]),
    "another torch beneath": (
        {**XLA, **NXD, **metadata("torch-neuronx", "2.8.0.2.10")},
        "NXDT-N004",
        ["torch-neuronx 2.8.0.2.10", "torch 2.13 with torch-neuronx 2.13"],
    ),
}


@pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="torch-xla is installed here; `make test` runs without it"
)
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_imported_is_refused_with_what_to_install(case: str, tmp_path: Path) -> None:
    files, code, words = CASES[case]
    for name, text in files.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = processes.run(
        [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", "parallel_engine.name=nxd"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "NEURON_RT_EXEC_TIMEOUT": "100"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"[{code}]" in done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert "does not read these variables" not in done.stderr  # the engine's runtime does
