"""Installs wheels that ``make accelerator-bundle`` gathered, for a machine without a network. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["COMMIT", "install", "missing"]

COMMIT = "nxdt_commit.txt"
"""In a bundle, and then next to nxdt: what ``git describe`` said where it was built."""


def install(bundle: Path, target: Path) -> dict[str, str]:
    """Install into ``target`` what this Python lacks of a folder of wheels; returns error by wheel that failed.

    Wheels of nxdt are always installed. Others are left out where some version is there already: the machine's own
    packages fit each other. A second call with the same wheels does nothing, so files that were changed there stay.
    """
    wheels = missing(sorted(bundle.glob("*.whl")))
    stamp, wanted = target / ".installed", "".join(f"{wheel.name} {wheel.stat().st_mtime_ns}\n" for wheel in wheels)
    if stamp.exists() and stamp.read_text() == wanted:
        return {}
    target.mkdir(parents=True, exist_ok=True)
    print(f"installing {', '.join(wheel.name.split('-')[0] for wheel in wheels)} into {target}", flush=True)
    failed = _install(wheels, target)
    if (bundle / COMMIT).exists():
        shutil.copy(bundle / COMMIT, target)
    if not failed:
        stamp.write_text(wanted)
    return failed


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels to install: those of nxdt, and of distributions that are not there."""
    return [wheel for wheel in wheels if wheel.name.startswith("nxdt_") or not _installed(wheel.name.split("-")[0])]


def _install(wheels: Sequence[Path], target: Path) -> dict[str, str]:
    """Install all at once; where that fails, each half by itself."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    command = [*pip, "--upgrade", "--target", str(target), *map(str, wheels)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return {}
    if len(wheels) == 1:
        return {wheels[0].name: done.stderr.strip().rpartition("\n")[2]}
    half = len(wheels) // 2
    return {**_install(wheels[:half], target), **_install(wheels[half:], target)}


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
