"""Builds the library of ``abacus.cpp``, once for each version of torch and of the source, and for all test workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["CACHE", "library"]

CACHE = "ABACUS_CACHE"
"""Variable with the directory of the library."""
_SOURCE = Path(__file__).with_name("abacus.cpp")


def library(cache: Path) -> Path:
    """The shared library in ``cache``, built if it is not there."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = cache / f"abacus-{digest}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that comes second waits, and compiles nothing
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=built.parent) as directory:
        made = Path(directory) / built.name
        command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", *include, str(_SOURCE), "-o", str(made), *link]
        subprocess.run(command, check=True)
        os.replace(made, built)
