"""Installs wheels that ``make accelerator-bundle`` gathered, for a machine without a network. Standard library only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["install", "missing"]


def install(bundle: Path, target: Path) -> Path:
    """Install into ``target`` what this Python lacks of a folder of wheels; returns ``target``.

    Wheels of nxdt are always installed. Others are left out where some version is there already: the machine's own
    packages fit each other.
    """
    wheels = missing(sorted(bundle.glob("*.whl")))
    print(f"installing {', '.join(wheel.name.split('-')[0] for wheel in wheels)} into {target}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "--target", str(target), *map(str, wheels)], check=True)
    return target


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels to install: those of nxdt, and of distributions that are not there."""
    return [wheel for wheel in wheels if wheel.name.startswith("nxdt_") or not _installed(wheel.name.split("-")[0])]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
