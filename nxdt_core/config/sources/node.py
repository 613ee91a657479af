"""The untyped tree between the sources and the schema: every value knows where it was written.

Nodes are never changed in place; merging and setting give new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, TypedDict

__all__ = ["LARGEST_INTEGER", "MASK", "describe_value", "Node", "Origin", "Place", "from_plain", "join", "merge", "replaced", "to_plain", "to_shown"]

MASK = "********"
"""Shown in place of a value that has no reference to show."""


LARGEST_INTEGER = 2**63 - 1
"""Integers go to torch, to C and to JSON, where they have 64 bits."""

_FOUND: dict[type, str] = {bool: "boolean", int: "an integer", float: "a number", str: "text"}


class Place(TypedDict):
    """What every problem says of where it is."""

    place: str
    line: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from."""

    kind: Literal["file", "override", "default", "plugin", "hf"]
    where: str
    """``run.yaml:12``, ``command line``, the plugin's name, the key that it follows, or a ``config.json``."""
    line: int = 0
    """Line in the file, counted from 1; 0 where there is none."""
    written: str = ""
    """Of a value that follows another key: where that key was written."""
    own: str = ""
    """Of a Hugging Face ``config.json``: its own name of the key."""
    directory: Path | None = None
    """Of a file: its directory, where its relative paths start; None for a mapping in memory."""

    def __str__(self) -> str:
        return self.where if self.kind in ("file", "override", "hf") else f"{self.kind} {self.where}".rstrip()

    def at(self, key: str) -> Place:
        """Return the place of a problem with ``key``."""
        own = f" ({self.own})" if self.own else ""
        return Place(place=self.written or f"{self}{own}", line=self.line, key=key)


@dataclass(frozen=True, slots=True)
class Node:
    """A mapping of nodes, a list of nodes, or a scalar."""

    value: Any
    """``dict[str, Node]``, ``list[Node]`` or a scalar."""
    origin: Origin
    shown: str | None = None
    """What is shown and written in place of a value that must not be: a reference to the environment, or
    :data:`MASK`; None: the value itself."""

    @property
    def children(self) -> dict[str, Node]:
        """The children of a mapping; none for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def find(self, path: str) -> Node | None:
        """Return the node at a dotted path below this one."""
        node: Node | None = self
        for part in path.split("."):
            node = node.children.get(part) if node is not None else None
        return node

    def plain(self, path: str, default: Any = None) -> Any:
        """Return the plain value at a dotted path, or ``default``."""
        node = self.find(path)
        return default if node is None else to_plain(node)

    def set(self, path: str, child: Node) -> Node:
        """This tree with ``child`` at a dotted path; mappings on the way are made where they lack."""
        head, _, rest = path.partition(".")
        if rest:
            below = self.children.get(head)
            start = below if below is not None and isinstance(below.value, dict) else Node({}, child.origin)
            child = start.set(rest, child)
        return replace(self, value={**self.children, head: child}, shown=None)

    def without(self, path: str) -> Node:
        """Return this tree without the value at a dotted path."""
        head, _, rest = path.partition(".")
        if head not in self.children:
            return self
        if rest:
            return replace(self, value={**self.children, head: self.children[head].without(rest)}, shown=None)
        return replace(self, value={key: child for key, child in self.children.items() if key != head}, shown=None)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield dotted path and plain value of everything that is not a mapping; an empty mapping counts as a value."""
        for path, node in self.leaf_nodes(prefix):
            yield path, to_plain(node)

    def leaf_nodes(self, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Yield the same with nodes instead of values."""
        if not self.children:
            yield prefix, self
        for key, child in self.children.items():
            yield from child.leaf_nodes(join(prefix, key))


def join(prefix: str, key: str) -> str:
    """Return the dotted path of ``key`` below ``prefix``."""
    return f"{prefix}.{key}" if prefix else key


def merge(low: Node, high: Node) -> Node:
    """Return both trees in one; where both give a value, that of ``high``. Lists are replaced, not joined.

    A mapping of a file keeps its line when another source adds to it: there a key of it is missing.
    """
    if not isinstance(low.value, dict) or not isinstance(high.value, dict):
        return high
    merged = dict(low.value)
    for key, child in high.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, low.origin if low.origin.kind == "file" else high.origin)


def from_plain(value: Any, origin: Origin) -> Node:
    """Return a tree of nodes that all have one origin."""
    if isinstance(value, Mapping):
        return Node({str(key): from_plain(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([from_plain(child, origin) for child in value], origin)
    return Node(str(value) if isinstance(value, PurePath) else value, origin)


def to_plain(node: Node) -> Any:
    """Return the tree without origins: dictionaries, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def to_shown(node: Node) -> Any:
    """Return the plain tree with references and masks in place of the values that must not be shown."""
    if node.shown is not None:
        return node.shown
    if isinstance(node.value, dict):
        return {key: to_shown(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_shown(child) for child in node.value]
    return node.value


def replaced(node: Node, path: tuple[str | int, ...], new: Node) -> Node:
    """Return the tree with ``new`` at the keys and list indices of ``path``, which exist."""
    if not path:
        return new
    children: Any = node.value.copy()
    children[path[0]] = replaced(children[path[0]], path[1:], new)
    return Node(children, node.origin)


def describe_value(value: Any) -> str:
    """Return a description of a found value: ``'12' (text)``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)) and not value:
        return "an empty list"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}…"
    return f"{text} ({'a list' if isinstance(value, (list, tuple)) else _FOUND.get(type(value), 'a value')})"
