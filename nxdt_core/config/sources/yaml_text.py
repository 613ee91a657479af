"""YAML text to nodes that know their lines. Nothing but plain data is ever constructed.

What differs from PyYAML's own constructors: a key that occurs twice is a problem, ``1e-4`` is a number, dates and
``1:30`` stay text, and a tag such as ``!!python/object`` is a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from nxdt_core.config.sources.node import LARGEST_INTEGER
from nxdt_core.config.sources.node import Node, Origin, join
from nxdt_core.errors.configuration import ConfigProblem, DuplicateKey, WrongValue, YamlSyntax, YamlTooLarge

__all__ = ["parse_scalar", "parse_yaml"]

_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+")
"""Floats of YAML 1.2 that PyYAML's YAML 1.1 takes for text: ``1e-4``, ``5e5``."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}
_TEXTS = {f"{_TAG}{name}" for name in ("str", "timestamp", "value")}
_COLLECTIONS = {f"{_TAG}{name}" for name in ("map", "seq")}
_DECIMAL = re.compile(r"[-+]?0[0-9_]+")
"""``010``: eight in YAML 1.1, ten in YAML 1.2 and for everybody who writes it."""
_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9][0-9_]*)")

_MOST_LEVELS = 100
"""Collections inside one another; a run's file has about six."""
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


class _TooLarge(Exception):
    """Ends the reading of a document with its one problem."""

    def __init__(self, problem: YamlTooLarge) -> None:
        super().__init__(str(problem))
        self.problem = problem


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
        except _TooLarge as error:
            return Node({}, self._origin(1)), [error.problem]
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
                    raise self._too_large(line, f"it is nested deeper than {_MOST_LEVELS} levels")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def _too_large(self, line: int, reason: str) -> _TooLarge:
        return _TooLarge(YamlTooLarge(place=f"{self.source}:{line}", line=line, key="", reason=reason))

    def _syntax(self, error: yaml.YAMLError) -> YamlSyntax:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        parts = [getattr(error, "context", None), getattr(error, "problem", None)]
        reason = ", ".join(part for part in parts if part) or " ".join(str(error).split())
        line = mark.line + 1 if mark is not None else 0
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
            return Node(self._scalar(node, path, origin), origin)
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
                self.problems.append(self._duplicate(join(path, name), line, own[name].origin))
            child = self._node(value_node, join(path, name))
            own[name] = Node(child.value, self._origin(line))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: str) -> dict[str, Node]:
        """Keys that ``<<`` brings; of several mappings the first wins."""
        merged: dict[str, Node] = {}
        for part in self._merge_parts(node):
            read = self._node(part, path)
            if isinstance(read.value, dict):
                merged = {**read.value, **merged}
            else:
                self._wrong(join(path, "<<"), read.origin, "no mapping", "a mapping or a list of mappings")
        return merged

    @staticmethod
    def _merge_parts(node: Any) -> Iterator[yaml.Node]:
        yield from node.value if isinstance(node, yaml.SequenceNode) else (node,)

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

    def _duplicate(self, key: str, line: int, first: Origin) -> ConfigProblem:
        return DuplicateKey(place=f"{self.source}:{line}", line=line, key=key, first=first.where)

    def _wrong(self, key: str, origin: Origin, found: str, allowed: str) -> None:
        self.problems.append(WrongValue(**origin.at(key), found=found, allowed=allowed))
