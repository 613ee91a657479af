"""How many faults are injected, and where the jobs save that meet them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.faults.place import Place
from tests.s3_server import BUCKET
from tests.sampling import sampled

T = TypeVar("T")
_COUNTS = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTS] = Counter()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    config = terminalreporter.config
    counts = config.stash[_COUNTS]
    if counts:
        parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"faults: {counts.total()} injections ({parts})")


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Callable[[Sequence[T], int], list[T]]:
    """``some(chances, count)``: that many of them, chosen by the seed and the test's name, or all."""

    return lambda chances, count: sampled(request.config, chances, count, of=request.node.name)


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
