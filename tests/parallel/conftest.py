"""The rank pools that the tests of layouts share."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from nxdt_core.testing.ranks import RankPool
from tests.parallel.matrix.layouts import Layout, Numbers
from tests.parallel.matrix.training import STEPS, Report, train


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], RankPool]:
    """``ranks(n).run(function, *arguments)`` calls a function on ``n`` real processes."""
    return cache(RankPool)


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
    """``one_process(layout, numbers)`` is what one process reports that trains the same model on the same data."""

    @cache
    def run(layout: Layout, numbers: Numbers, steps: int) -> Report:
        (report,) = ranks(1).run(train, layout, numbers, steps, timeout_s=180)
        return report

    return lambda layout, numbers, steps=STEPS: run(layout.one_process, numbers, steps)
