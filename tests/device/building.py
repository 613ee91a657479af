"""Builds the library of ``abacus.cpp``, once for each version of torch and of the source."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["CACHE", "library"]

CACHE = "ABACUS_CACHE"
"""Variable with the directory of the library."""


def library(cache: Path) -> Path:
    """The shared library in ``cache``, built if it is not there."""
    source = Path(__file__).with_name("abacus.cpp")
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = cache / f"abacus-{digest}.so"
    if not built.exists():
        root = Path(torch.__file__).parent
        include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        link = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / built.name
            command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", *include, str(source), "-o", str(made), *link]
            subprocess.run(command, check=True)
            os.replace(made, built)  # another process may have built it meanwhile
    return built
