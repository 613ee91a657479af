"""The rank pools that the tests of layouts use."""

from collections.abc import Callable
from functools import partial

import pytest
from nxdt_testing.ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Callable[[int], RankPool]:
    """``ranks(n).run(function, *arguments)`` calls a function on ``n`` real processes, which stay for the tests of a
    module."""
    return partial(RankPool, lasting=True)
