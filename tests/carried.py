"""Files that installed packages carry, found without the packages' imports, which take up to two CPU-seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["carried"]


def carried(package: str, *path: str) -> Path:
    """Return a file of an installed package; skip the test where it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package}, which carries the files, is not installed")
    return Path(spec.origin).parent.joinpath(*path)
