"""The rank pools that the tests of layouts share."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from nxdt_core.testing.ranks import RankPool
from tests.parallel.matrix.layouts import Layout, Numbers
from tests.parallel.matrix.training import Report, train
from tests.sampling import shortened


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], RankPool]:
    """``ranks(n).run(function, *arguments)`` calls a function on ``n`` real processes."""
    return cache(RankPool)


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """``steps(20)`` is how many of 20 steps this run takes (:func:`tests.sampling.shortened`)."""
    return partial(shortened, pytestconfig)


@pytest.fixture(scope="session")
def alone(ranks: Callable[[int], RankPool]) -> Callable[..., Report]:
    """``alone(numbers, steps, model, *more, packed=…)`` is what one process reports of a model that is built of these
    keys; ``more`` as for :func:`tests.parallel.matrix.training.train`."""
    kept: dict[str, Report] = {}

    def run(*arguments: Any, packed: bool = False) -> Report:
        key = repr((arguments, packed))
        if key not in kept:
            (kept[key],) = ranks(1).run(train, Layout(packed=packed), *arguments, timeout_s=240)
        return kept[key]

    return run


@pytest.fixture(scope="session")
def one_process(ranks: Callable[[int], RankPool]) -> Callable[..., Report]:
    """``one_process(layout, numbers, steps)`` is what one process reports of the same model and data."""

    @cache
    def run(layout: Layout, numbers: Numbers, steps: int) -> Report:
        (report,) = ranks(1).run(train, layout, numbers, steps, timeout_s=180)
        return report

    return lambda layout, numbers, steps: run(layout.one_process, numbers, steps)
