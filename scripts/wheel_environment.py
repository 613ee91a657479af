"""Wheels of this repository, and environments that have nothing but them and what they require.

An environment sees third-party packages of the running Python through links and a ``.pth`` file, so that making one
takes seconds and no disk. Distributions of this repository it gets from wheels alone, resolved by pip without an index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["SITE", "Environment", "Third", "build_wheels", "copy_sources", "requirements_of"]

SITE = Path(sysconfig.get_path("purelib"))
_NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "dist", "site", "nxdt_experiments", "accelerator_day")
_BUILD = """
import os, sys
from hatchling.build import build_wheel
for project in sys.argv[2:]:
    os.chdir(project)
    build_wheel(sys.argv[1])
"""
"""What ``python -m build --wheel`` does, without an interpreter for each."""


def copy_sources(root: Path, copy: Path) -> Path:
    """Copy a repository's sources, since building writes into them, and return the copy."""
    return Path(shutil.copytree(root, copy, ignore=_NOT_SOURCE))


def build_wheels(projects: Iterable[Path], out: Path) -> None:
    """Build the wheel of each project into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-c", _BUILD, out.resolve(), *projects)


def requirements_of(wheel: Path) -> list[str]:
    """Return the ``Requires-Dist`` lines of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        return PathDistribution(zipfile.Path(archive, f"{info}/")).requires or []


class Third:
    """Third-party distributions of the running Python that some requirements ask for, directly or not.

    Example::

        third = Third.of(["nxdt-plugin-llama", "pytest"], wheels=Path("dist"))
        third.link(Path("third_party"))
    """

    def __init__(self, found: dict[str, Distribution]) -> None:
        self.found = found
        """Distribution by name; those of the wheels are left out."""

    @classmethod
    def of(cls, requirements: Iterable[str], *, wheels: Path) -> Third:
        """Return what ``requirements`` need in this Python; those in ``wheels`` are read from there."""
        ours = {canonicalize_name(path.name.partition("-")[0]): path for path in wheels.glob("*.whl")}
        here = {
            canonicalize_name(distribution.metadata["Name"]): distribution
            for distribution in distributions(path=[str(SITE)])
        }
        found: dict[str, Distribution] = {}
        seen: set[tuple[str, str]] = set()
        queue = [Requirement(line) for line in requirements]
        while queue:
            wanted = queue.pop()
            name = canonicalize_name(wanted.name)
            new = {extra for extra in ("", *wanted.extras) if (name, extra) not in seen}
            seen |= {(name, extra) for extra in new}
            if name not in ours and name in here:
                found[name] = here[name]
            lines = requirements_of(ours[name]) if name in ours else here[name].requires if name in here else None
            for each in map(Requirement, (lines or []) if new else []):
                if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in new):
                    queue.append(each)
        return cls(found)

    def link(self, directory: Path) -> Path:
        """Fill a directory with links to their packages, modules and metadata, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        for each in self.found.values():
            for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if (SITE / top).exists() and not (directory / top).exists() and not top.endswith(".pth"):
                    (directory / top).symlink_to(SITE / top)
        return directory


class Environment:
    """A virtual environment without pip, and the commands in it."""

    def __init__(self, root: Path, third_party: Path) -> None:
        self.bin = root / "bin"
        self.python = self.bin / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)}))
        _run(sys.executable, "-m", "venv", "--without-pip", root)
        (self.site / "third_party.pth").write_text(f"{third_party}\n")

    def install(self, wheels: Path, *dists: str) -> None:
        """Resolve and install from a directory of wheels, with no index."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        quick = ("--no-compile", "--no-warn-conflicts")  # halves pip's time; Python compiles what it imports
        _run(*pip, "install", "--quiet", "--no-index", *quick, "--find-links", wheels, *dists)

    def run(self, *args: str | Path, cwd: Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; nothing of the surrounding Python is inherited."""
        return subprocess.run(
            [str(self.bin / args[0]), *map(str, args[1:])],
            cwd=cwd,
            env={"PATH": f"{self.bin}{os.pathsep}{os.defpath}", "OMP_NUM_THREADS": "1", "HOME": str(cwd)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=280, check=False)
    if done.returncode != 0:
        words = re.sub(r"\s+", " ", " ".join(map(str, command)))
        raise RuntimeError(f"{words}\n{done.stdout}\n{done.stderr}")
