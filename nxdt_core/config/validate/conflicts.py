"""Two spellings of one setting that say different things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nxdt_core.config.resolve.alignment import Pair
from nxdt_core.config.resolve.interpolation import UNRESOLVED
from nxdt_core.config.secrets.messages import describe_node
from nxdt_core.config.sources.node import Node, to_plain
from nxdt_core.errors.configuration import ConflictingKeys

__all__ = ["find_conflicts"]


def find_conflicts(tree: Node, pairs: Iterable[Pair]) -> Iterator[ConflictingKeys]:
    """Yield the pairs whose resolved values differ."""
    for one, other in pairs:
        left, right = tree.find(one), tree.find(other)
        if left is None or right is None or UNRESOLVED in (left.value, right.value):
            continue
        if to_plain(left) != to_plain(right):
            yield ConflictingKeys(
                **left.origin.at(one),
                found=f"found {describe_node(left)}",
                other=other,
                other_place=right.origin.at(other)["place"],
                other_found=describe_node(right),
            )
