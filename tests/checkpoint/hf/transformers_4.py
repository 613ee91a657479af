"""Runs a program with transformers 4, which other programs still read Hugging Face directories with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0", "peft==0.17.1")


@pytest.fixture(scope="session")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``transformers_4(program, *arguments)``: the JSON that a program prints in a process with transformers 4."""
    target = tmp_path_factory.mktemp("transformers_4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(target), *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip could not fetch {PACKAGES[0]}: {done.stderr.strip().splitlines()[-1:]}")

    return partial(_run, {"PYTHONPATH": str(target)})


def read_here(program: str, *arguments: str | Path) -> Any:
    """Return the JSON that a Python program prints, in a process with the installed transformers."""
    return _run({}, program, *arguments)


def _run(environment: Mapping[str, str], program: str, *arguments: str | Path) -> Any:
    told = [sys.executable, "-c", program, *map(str, arguments)]
    child = subprocess.run(told, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout)
