"""What rules look at: typed values by key path, and where each was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.config.sources.node import Node, Origin, Place

__all__ = ["Checked"]


@dataclass(frozen=True, slots=True)
class Checked:
    """The values that were read; a wrong one is absent, and rules that need it keep silent."""

    values: Mapping[str, Any]
    tree: Node

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or no number."""
        found = [self.values.get(key) for key in keys]
        if any(type(value) not in (int, float) for value in found):
            return None
        return tuple(value for value in found if value is not None)

    def origin(self, key: str) -> Origin:
        """Return where the value of ``key`` comes from."""
        node = self.tree.find(key)
        return node.origin if node is not None else self.tree.origin

    def place(self, *keys: str) -> Place:
        """Return the place of a problem between ``keys``: the first that is written, by default the first."""
        key = next((key for key in keys if self.origin(key).kind != "default"), keys[0])
        return self.origin(key).at(key)
