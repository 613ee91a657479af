"""Runs the real command in a child process, and builds distributions for it to find."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nxdt_core.testing.distributions import write_distribution

Run = Callable[..., subprocess.CompletedProcess[str]]

_NO_TORCH = "import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory on the path of the commands that ``nxdt`` runs."""
    directory = tmp_path / "site"
    directory.mkdir()
    return directory


@pytest.fixture
def nxdt(tmp_path: Path, site: Path) -> Run:
    """Run ``nxdt ARGS`` in an empty directory; ``without`` names modules that cannot be imported."""
    work = tmp_path / "work"
    work.mkdir()

    def run(*args: str, without: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        (site / "usercustomize.py").write_text("")
        (site / "sitecustomize.py").write_text(_NO_TORCH.format(names=without))
        return subprocess.run(
            [sys.executable, "-m", "nxdt_core", *args],
            cwd=work,
            env={"PATH": "", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def dist(site: Path) -> Callable[..., None]:
    """Put a distribution with one plugin on the path: ``dist("acme", "source of its entry module")``."""

    def make(name: str, source: str, *, requires: str = "nxdt-core>=0.1,<0.2", **modules: str) -> None:
        files = {f"{module}.py": text for module, text in {name: source, **modules}.items()}
        write_distribution(site, name, plugins={name: name}, files=files, requires=(requires,))

    return make
