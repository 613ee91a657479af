"""Memory counted after collectives: a thread of gloo holds its tensors for a moment after the wait for them returns."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = (0.05, 0.25)


def at_rest(count: Callable[[], int]) -> int:
    """Return the least of what ``count`` gives at a few moments, so that only what is kept for longer counts."""
    least = count()
    for seconds in _SECONDS:
        time.sleep(seconds)
        least = min(least, count())
    return least
