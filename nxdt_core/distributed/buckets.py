"""Items in groups of a limited size: what is read, copied, sent or updated at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def buckets(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield ``items`` in their order, in groups whose sizes add up to at most ``limit``; a larger item is alone."""
    group: list[T] = []
    filled = 0
    for item in items:
        item_size = size(item)
        if group and filled + item_size > limit:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += item_size
    if group:
        yield group
