"""The untyped tree between the sources and the schema, in which every value knows where it was written.

Nodes are never changed in place; merging and setting give new ones. From YAML nothing but plain data is constructed.
What differs from PyYAML's constructors: a key that occurs twice is a problem, ``1e-4`` is a number, dates and ``1:30``
stay text, and a tag such as ``!!python/object`` is a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, TypedDict

import yaml

from nxdt_core.errors.configuration import ConfigProblem, DuplicateKey, WrongValue, YamlSyntax, YamlTooLarge

__all__ = [
    "LARGEST_INTEGER",
    "MASK",
    "KeyPath",
    "Node",
    "Origin",
    "Place",
    "describe_value",
    "dotted",
    "find_node",
    "from_plain",
    "join",
    "mapped",
    "merge",
    "parse_scalar",
    "parse_yaml",
    "replaced",
    "to_plain",
    "walk",
]

MASK = "********"
"""Shown in place of a value that has no reference to show."""


LARGEST_INTEGER = 2**63 - 1
"""Integers go to torch, to C and to JSON, where they have 64 bits."""

_FOUND: dict[type, str] = {bool: "boolean", int: "an integer", float: "a number", str: "text"}


KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root."""


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
    text: str = ""
    """Of a number: its characters, which may be those of a name, such as ``2026_11_28``."""
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
        yield from ((path, to_plain(node)) for path, node in self.leaf_nodes(prefix))

    def leaf_nodes(self, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Yield the same with nodes instead of values."""
        if not self.children:
            yield prefix, self
        for key, child in self.children.items():
            path = join(prefix, key)
            if child.children:
                yield from child.leaf_nodes(path)
            else:
                yield path, child


def join(prefix: str, key: str) -> str:
    """Return the dotted path of ``key`` below ``prefix``."""
    return f"{prefix}.{key}" if prefix else key


def dotted(path: KeyPath) -> str:
    """Return a place as messages name it: ``exp_manager.loggers[0].token``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield a node and all below it, each with its place; mappings and lists before what they hold."""
    yield path, node
    children: Any = node.value
    if isinstance(children, (dict, list)):
        for part, child in children.items() if isinstance(children, dict) else enumerate(children):
            if isinstance(child.value, (dict, list)):
                yield from walk(child, (*path, part))
            else:  # most nodes: a generator for each would take most of the time
                yield (*path, part), child


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the tree with each node changed, after those below it."""
    value = node.value
    if isinstance(value, dict):
        node = Node({key: mapped(child, change) for key, child in value.items()}, node.origin, node.shown)
    elif isinstance(value, list):
        node = Node([mapped(child, change) for child in value], node.origin, node.shown)
    return change(node)


def find_node(node: Node | None, path: KeyPath) -> Node | None:
    """Return the node at keys and list indices, or None."""
    for part in path:
        value: Any = None if node is None else node.value
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        node = value[part] if inside else None
    return node


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
    """Return a tree of nodes that all have one origin; sections are mappings of their keys."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True)
    if isinstance(value, Mapping):
        return Node({str(key): from_plain(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([from_plain(child, origin) for child in value], origin)
    return Node(str(value) if isinstance(value, PurePath) else value, origin)


def to_plain(node: Node, *, shown: bool = False) -> Any:
    """Return the tree without origins: dictionaries, lists and scalars.

    Args:
        node: the tree.
        shown: put references and masks in place of the values that must not be shown.
    """
    if shown and node.shown is not None:
        return node.shown
    if isinstance(node.value, dict):
        return {key: to_plain(child, shown=shown) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child, shown=shown) for child in node.value]
    return node.value


def replaced(node: Node, path: KeyPath, new: Node) -> Node:
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


_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+")
"""Floats of YAML 1.2 that PyYAML's YAML 1.1 takes for text: ``1e-4``, ``5e5``."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = set(map(_TAG.__add__, ("null", "bool", "int", "float")))
_TEXTS = set(map(_TAG.__add__, ("str", "timestamp", "value")))
_COLLECTIONS = set(map(_TAG.__add__, ("map", "seq")))
_DECIMAL = re.compile(r"[-+]?0[0-9_]+")
"""``010``: eight in YAML 1.1, ten in YAML 1.2 and for everybody who writes it."""
_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)")

_MOST_LEVELS = 100
"""Collections inside one another; a run's file has about six."""
_TOO_DEEP = f"it is nested deeper than {_MOST_LEVELS} levels"
_MOST_NODES = 100_000
"""Values of a document with its aliases written out; a run's file has some hundreds. Ten aliases of ten aliases, eight
times over, are a hundred million."""
_SHOWN = 60
"""Characters of a value that a message shows."""

# libyaml composes a run's file in 1 ms, the pure Python parser in 20 ms; a wheel without libyaml still works.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, source: str, directory: Path | None = None) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree of a YAML document and what is wrong with it. An empty document is an empty mapping.

    Args:
        text: The document.
        source: What places in it are called.
        directory: Where its relative paths start.
    """
    return _Document(source, directory).read(text)


def parse_scalar(text: str) -> Any:
    """Return the plain value that YAML reads from ``text``; invalid YAML is returned as text."""
    tree, problems = parse_yaml(f"value: {text}", "")
    return text if problems else tree.plain("value")


class _Document:
    """One pass over one document's nodes."""

    def __init__(self, source: str, directory: Path | None) -> None:
        self.source = source
        self.directory = directory
        self.problems: list[ConfigProblem] = []
        self.open: set[int] = set()
        """Identities of the collections that are being read: an anchor inside itself would never end."""
        self.nodes = 0
        """Nodes read so far; those of an alias count each time."""

    def read(self, text: str) -> tuple[Node, list[ConfigProblem]]:
        try:
            loader = _Loader(text)
        except UnicodeEncodeError as error:  # a command line whose bytes are not UTF-8
            reason = f"it holds half a character, {error.object[error.start]!r}"
            return Node({}, self._origin(1)), [YamlSyntax(place=self.source, line=0, key="", reason=reason)]
        try:
            self._check_depth(text)
            root = loader.get_single_node()
            if root is None:
                return Node({}, self._origin(1)), []
            self.construct = loader.construct_object
            return self._node(root, ""), self.problems
        except yaml.YAMLError as error:
            return Node({}, self._origin(1)), [self._syntax(error)]
        except YamlTooLarge as problem:
            return Node({}, self._origin(1)), [problem]
        finally:
            loader.dispose()

    def _check_depth(self, text: str) -> None:
        """Refuse deep nesting before anything recurses into it; the parser itself does not."""
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > _MOST_LEVELS:
                    line = event.start_mark.line + 1 if event.start_mark else 1
                    raise self._too_large(line, _TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def _too_large(self, line: int, reason: str) -> YamlTooLarge:
        return YamlTooLarge(**self._origin(line).at(""), reason=reason)

    def _syntax(self, error: yaml.YAMLError) -> YamlSyntax | YamlTooLarge:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        parts = [getattr(error, "context", None), getattr(error, "problem", None)]
        reason = ", ".join(part for part in parts if part) or " ".join(str(error).split())
        if parts[0] == "while scanning an alias":
            reason = "'*' begins the name of an anchor there; quote a text that begins with it: '*.jsonl'"
        line = mark.line + 1 if mark is not None else 0
        if "maximum nesting depth" in reason:  # libyaml 0.2.6 reads ahead, and is the first to notice
            return self._too_large(line, _TOO_DEEP)
        return YamlSyntax(place=f"{self.source}:{line}" if line else self.source, line=line, key="", reason=reason)

    def _origin(self, line: int) -> Origin:
        return Origin(kind="file", where=f"{self.source}:{line}", line=line, directory=self.directory)

    def _node(self, node: yaml.Node, path: str) -> Node:
        origin = self._origin(node.start_mark.line + 1)
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise self._too_large(
                origin.line, f"with its aliases (*name) written out it has over {_MOST_NODES:,} values"
            )
        if isinstance(node, yaml.ScalarNode):
            scalar = self._scalar(node, path, origin)
            return Node(scalar, replace(origin, text=node.value if type(scalar) in (int, float) else ""))
        if id(node) in self.open:
            self._wrong(path, origin, "an anchor that contains itself", "values that end")
            return Node(None, origin)
        if node.tag not in _COLLECTIONS:
            self._tagged(node, path, origin)
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self._node(item, f"{path}[{number}]") for number, item in enumerate(node.value)]
        else:
            value = self._mapping(node, path)
        self.open.remove(id(node))
        return Node(value, origin)

    def _mapping(self, node: Any, path: str) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                merged = {**self._merged(value_node, path), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(path, self._origin(line), "a key that is a list or mapping", "keys that are text")
                continue
            # The text of the key, so that `on:` and `1:` are keys as written.
            name = key_node.value
            if name in own:
                place = self._origin(line).at(join(path, name))
                self.problems.append(DuplicateKey(**place, first=own[name].origin.where))
            child = self._node(value_node, join(path, name))
            own[name] = Node(child.value, replace(self._origin(line), text=child.origin.text))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: str) -> dict[str, Node]:
        """Keys that ``<<`` brings; of several mappings the first wins."""
        merged: dict[str, Node] = {}
        for part in node.value if isinstance(node, yaml.SequenceNode) else (node,):
            read = self._node(part, path)
            if isinstance(read.value, dict):
                merged = {**read.value, **merged}
            else:
                self._wrong(join(path, "<<"), read.origin, "no mapping", "a mapping or a list of mappings")
        return merged

    def _scalar(self, node: Any, path: str, origin: Origin) -> Any:
        if node.tag in _TEXTS:
            plain = node.style is None or node.style == ""
            return float(node.value.replace("_", "")) if plain and _FLOAT.fullmatch(node.value) else node.value
        if node.tag not in _SCALARS:
            self._tagged(node, path, origin)
            return None
        if ":" in node.value:  # YAML 1.1 reads 1:30 as the number 90
            return node.value
        try:
            value = int(node.value.replace("_", "")) if _DECIMAL.fullmatch(node.value) else self.construct(node)
            if isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
                raise ValueError
            return value
        except (yaml.YAMLError, ValueError):  # an explicit tag on text that is none (`!!int x`), or too many digits
            text = node.value if len(node.value) <= _SHOWN else f"{node.value[:_SHOWN]}…"
            if _INTEGER.fullmatch(node.value):
                self._wrong(path, origin, text, f"integers from {-LARGEST_INTEGER - 1} to {LARGEST_INTEGER}")
            else:
                self._wrong(path, origin, f"{text!r} tagged {node.tag.replace(_TAG, '!!')}", "a value of that type")
            return None

    def _tagged(self, node: Any, path: str, origin: Origin) -> None:
        self._wrong(path, origin, f"the tag {node.tag.replace(_TAG, '!!')}", "plain values without tags")

    def _wrong(self, key: str, origin: Origin, found: str, allowed: str) -> None:
        self.problems.append(WrongValue(**origin.at(key), found=found, allowed=allowed))
