"""The rank pools that the tests of layouts share."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from nxdt_testing.ranks import RankPool

from tests.engine.matrix.layouts import Layout, Numbers
from tests.engine.matrix.training import Report, train
from tests.sampling import shortened, takes_all


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], RankPool]:
    """``ranks(n).run(function, *arguments)`` calls a function on ``n`` real processes, which stay for the tests of a
    module."""
    return cache(partial(RankPool, lasting=True))


@pytest.fixture(scope="session")
def new_ranks() -> Callable[[int], RankPool]:
    """``ranks`` with new processes for each call: where a call changes them, compiles or measures memory."""
    return cache(RankPool)


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """``steps(20)`` is how many of 20 steps this run takes: 3, of those that :func:`tests.sampling.shortened` names."""
    return lambda count: shortened(pytestconfig, count if takes_all(pytestconfig) else min(count, 3))


@pytest.fixture(scope="session")
def alone(ranks: Callable[[int], RankPool]) -> Callable[..., Report]:
    """``alone(layout, numbers, steps, *more)`` is what one process reports of the model and data of ``layout``.

    ``more`` is as for :func:`tests.engine.matrix.training.train`.
    """
    kept: dict[str, Report] = {}

    def run(layout: Layout, numbers: Numbers, steps: int, *more: Any) -> Report:
        key = repr((layout.one_process, numbers, steps, more))
        if key not in kept:
            (kept[key],) = ranks(1).run(train, layout.one_process, numbers, steps, *more, timeout_s=240)
        return kept[key]

    return run
