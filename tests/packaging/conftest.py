"""Wheels built from a copy of the tree, and a clean environment that they are installed into.

The environment sees those third-party packages of the one that runs the tests that the wheels and pytest require,
through links and a ``.pth`` file, and none of its nxdt distributions: those it gets from the wheels alone, resolved by
pip with ``--no-index``.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.wheel_environment import Environment, Third, build_wheels, copy_sources

ROOT = Path(__file__).parents[2]
DISTS = (
    ".",
    "testing",
    *sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/*/pyproject.toml")),
)
META = "meta"
THIRD_PARTY = "examples/third_party"
ENGINE = "examples/one_process_engine"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's sources: building writes beside them."""
    return copy_sources(ROOT, tmp_path_factory.mktemp("source") / "nxdt")


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
    build_wheels((*(source / dist for dist in (*DISTS, META)), outside, engine), out)
    return out


def _environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path, dists: Sequence[str]) -> Environment:
    third_party = Third.of([*dists, "pytest"], wheels=wheels).link(tmp_path_factory.mktemp("third-party"))
    environment = Environment(tmp_path_factory.mktemp("clean") / "env", third_party)
    environment.install(wheels, *dists)
    return environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Callable[..., Environment]:
    """``environment(*dists)``: a clean environment with these and what they ask for."""
    return lambda *dists: _environment(tmp_path_factory, wheels, dists)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Environment:
    """A clean environment with two of nxdt's plugins, as extras of the meta package, and the third party's two."""
    return _environment(tmp_path_factory, wheels, ("nxdt[llama,text,testing]", "acme-nxdt", "acme-engine"))
