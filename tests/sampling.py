"""Which of many cases a test run takes: all of them, or a sample that a seed decides.

The ``conftest.py`` of the repository adds the option ``--samples``. Its default is a fixed seed, so that one commit
always gives the same tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

import pytest

__all__ = ["DEFAULT", "resolve", "sampled", "takes_all"]

Case = TypeVar("Case")

DEFAULT = "0"
_ALL, _TODAY = "all", "today"


def resolve(option: str) -> str:
    """Return ``all`` or the seed that an option means: ``today`` is the number of the date."""
    return str(date.today().toordinal()) if option == _TODAY else option


def takes_all(config: pytest.Config) -> bool:
    """Return whether the run takes every case."""
    return bool(config.getoption("samples") == _ALL)


def sampled(config: pytest.Config, cases: Iterable[Case], count: int, *, of: str = "") -> list[Case]:
    """Return all cases under ``--samples=all``, else at most ``count`` of them.

    Args:
        config: of the run.
        cases: what can be taken.
        count: how many to take.
        of: name of the test, where tests that share cases should take different ones.
    """
    known = [*cases]
    if takes_all(config):
        return known
    return random.Random(f"{config.getoption('samples')} {of}").sample(known, min(count, len(known)))
