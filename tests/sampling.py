"""Which of many cases a test run takes: all of them, or a sample that a seed decides.

``nxdt_testing.samples`` adds the option ``--samples``. Its default in this repository is a fixed seed, so that one
commit always gives the same tests.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from typing import Any, TypeVar

import pytest

__all__ = ["DEFAULT", "asked", "sampled", "shortened", "slow", "slow_except", "takes_all"]

Case = TypeVar("Case")

DEFAULT = "0"
_ALL = "all"


def takes_all(config: pytest.Config) -> bool:
    """Return whether the run takes every case."""
    return bool(config.getoption("samples") == _ALL)


def slow(*values: Any) -> Any:
    """Return a case for ``parametrize`` that only ``--samples=all`` takes, since other cases show the same property."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(cases: Iterable[Case], kept: Container[Case]) -> list[Any]:
    """Return cases for ``parametrize``, of which only ``--samples=all`` takes those that are not in ``kept``."""
    return [case if case in kept else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def asked(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Return the values of a parameter that the tests of this run and file have, also where a slow one is named."""
    of_file = (item for item in request.session.items if item.path == request.path)
    found = (item.callspec.params for item in of_file if hasattr(item, "callspec"))
    return {params[parameter] for params in found if parameter in params}


def shortened(config: pytest.Config, steps: int) -> int:
    """Return how many steps to take where each is compared: ``steps`` under ``--samples=all``, else at most 4.

    The first applies gradients, the second has an optimizer's state, the third shows what the second has changed.
    """
    return steps if takes_all(config) else min(steps, 4)


def sampled(
    config: pytest.Config, cases: Iterable[Case], count: int, *, of: str = "", default: Iterable[Case] = ()
) -> list[Case]:
    """Return all cases under ``--samples=all``, else at most ``count`` of them.

    Args:
        config: of the run.
        cases: what can be taken.
        count: how many to take.
        of: name of the test, where tests that share cases should take different ones.
        default: cases that the default seed takes, where chance would take expensive ones or leave a property out.
    """
    known = [*cases]
    if takes_all(config):
        return known
    if config.getoption("samples") == DEFAULT and (chosen := [*default]):
        assert all(case in known for case in chosen)
        return chosen
    return random.Random(f"{config.getoption('samples')} {of}").sample(known, min(count, len(known)))
