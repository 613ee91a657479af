"""Wheels built from a copy of the tree, and a clean environment that they are installed into.

The environment sees the third-party packages of the one that runs the tests, through links and a ``.pth`` file, and
none of its nxdt distributions: those it gets from the wheels alone, resolved by pip with ``--no-index``.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTS = (".", *sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/*/pyproject.toml")))
THIRD_PARTY = "examples/third_party"
ENGINE = "examples/one_process_engine"
_NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "dist", "site", "nxdt_experiments", "accelerator_day")

_BUILD = """
import os, sys
from hatchling.build import build_wheel
for project in sys.argv[2:]:
    os.chdir(project)
    build_wheel(sys.argv[1])
"""
"""What ``python -m build --wheel`` does, without an interpreter for each."""


def _run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's sources: building writes beside them."""
    copy = tmp_path_factory.mktemp("source") / "nxdt"
    shutil.copytree(ROOT, copy, ignore=_NOT_SOURCE)
    return copy


@pytest.fixture(scope="session")
def outside(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The third party's plugin alone, where no file of the repository is near."""
    return Path(shutil.copytree(source / THIRD_PARTY, tmp_path_factory.mktemp("outside") / "acme"))


@pytest.fixture(scope="session")
def engine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The third party's engine alone."""
    return Path(shutil.copytree(source / ENGINE, tmp_path_factory.mktemp("outside") / "engine"))


@pytest.fixture(scope="session")
def wheels(source: Path, outside: Path, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheels of all dists and of the third party's plugins."""
    out = tmp_path_factory.mktemp("wheels")
    projects = (*(source / dist for dist in DISTS), outside, engine)
    _run(sys.executable, "-c", _BUILD, out, *projects)
    return out


class Environment:
    """A virtual environment without pip, and the commands in it."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)}))
        _run(sys.executable, "-m", "venv", "--without-pip", root)

    def see(self, directory: Path) -> None:
        """Put a directory on the environment's path."""
        (self.site / "third_party.pth").write_text(f"{directory}\n")

    def install(self, wheels: Path, *dists: str) -> None:
        """Resolve and install from a directory of wheels, with no index."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python")
        _run(*pip, "install", "--quiet", "--no-index", "--find-links", wheels, *dists)

    def run(self, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; nothing of the surrounding Python is inherited."""
        return subprocess.run(
            [str(self.bin / args[0]), *map(str, args[1:])],
            cwd=cwd,
            env={"PATH": f"{self.bin}{os.pathsep}{os.defpath}", "OMP_NUM_THREADS": "1", "HOME": str(cwd)},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


def _environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path, dists: Sequence[str]) -> Environment:
    third_party = tmp_path_factory.mktemp("third-party")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "nxdt" not in path.name and path.suffix != ".pth":
            (third_party / path.name).symlink_to(path)
    environment = Environment(tmp_path_factory.mktemp("clean") / "env")
    environment.see(third_party)
    environment.install(wheels, *dists)
    return environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Callable[..., Environment]:
    """``environment(*dists)``: a clean environment with these and what they ask for."""
    return lambda *dists: _environment(tmp_path_factory, wheels, dists)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Environment:
    """A clean environment with nxdt's plugins, as the README installs them, and the third party's two."""
    return _environment(tmp_path_factory, wheels, ("nxdt-plugin-llama", "nxdt-plugin-text", "acme-nxdt", "acme-engine"))
