"""How many faults are injected, and where the jobs save that meet them."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nxdt_core.testing.s3_server import BUCKET
from tests.faults.place import Place

T = TypeVar("T")
_COUNTS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults",
        default=str(date.today().toordinal()),
        metavar="full|SEED",
        help="faults of tests/faults to inject: all, or a sample by this seed (default: the date's)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTS] = Counter()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    config = terminalreporter.config
    counts = config.stash[_COUNTS]
    if counts:
        parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(
            f"faults: --faults={config.getoption('--faults')}, {counts.total()} injections ({parts})"
        )


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all faults are injected."""
    return bool(request.config.getoption("--faults") == "full")


@pytest.fixture
def some(request: pytest.FixtureRequest, full: bool) -> Callable[[Sequence[T], int], list[T]]:
    """``some(chances, count)``: that many of them, chosen by the seed and the test's name, or all."""

    def choose(chances: Sequence[T], count: int) -> list[T]:
        if full:
            return list(chances)
        chosen = random.Random(f"{request.config.getoption('--faults')} {request.node.name}")
        return chosen.sample(list(chances), min(count, len(chances)))

    return choose


@pytest.fixture
def injected(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """``injected(what, count)`` adds to the numbers that the summary prints."""
    return lambda what, count: request.config.stash[_COUNTS].update({what: count})


@pytest.fixture
def new_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Place]:
    """``new_place("s3")``: a place where nothing lies yet."""

    def make(store: str, *, in_parts: bool = False) -> Place:
        name = secrets.token_hex(4)
        if store == "local":
            return Place(str(tmp_path / name))
        server = request.getfixturevalue("s3_server")
        request.getfixturevalue("s3_credentials")
        return Place(f"s3://{BUCKET}/{name}", server.url, in_parts)

    return make
