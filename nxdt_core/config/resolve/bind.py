"""From the filled tree to typed instances, with every wrong type, unknown key and missing key on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from nxdt_core.config.annotations import DefaultsTo
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.fields.keys import Key
from nxdt_core.config.fields.types import Choice, Items, Mismatch, Scalar, Shape
from nxdt_core.config.output.suggest import nearest_keys
from nxdt_core.config.resolve.defaults import complete, section_keys
from nxdt_core.config.resolve.interpolation import UNRESOLVED
from nxdt_core.config.resolve.path_values import Locator
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.secrets.messages import describe_node, is_hidden
from nxdt_core.config.sources.node import Node, join, to_plain
from nxdt_core.errors.configuration import (
    ComponentFinding,
    ConfigProblem,
    MissingKey,
    UnknownKey,
    WrongValue,
)

__all__ = ["Reading", "read_part", "read_tree"]

_INVALID: Any = object()
"""What reading gives for a value that is wrong: reported, not used."""


@dataclass(slots=True)
class Reading:
    """The sections, values and problems that reading a configuration gave."""

    run: RunConfig | None
    """None where a core key is wrong."""
    tree: Node
    """The tree with paths made absolute."""
    values: dict[str, Any] = field(default_factory=dict)
    """Typed value by key path; wrong ones are absent."""
    instances: dict[str, Any] = field(default_factory=dict)
    """By section: an instance of the component's dataclass."""
    problems: list[ConfigProblem] = field(default_factory=list)
    followers: dict[str, str] = field(default_factory=dict)
    """Key → key that it takes its value from: a wrong value is reported at the latter."""


def read_tree(tree: Node, composition: Composition, known: Sequence[str], locator: Locator) -> Reading:
    """Read the filled tree into a :class:`RunConfig` and the components' dataclasses."""
    reader = _Reader(tree, composition, known, locator)
    run = reader.section(RunConfig, tree, "")
    reader.result.run = None if run is _INVALID else run
    return reader.result


def read_part(cls: type, node: Node, path: str, locator: Locator) -> tuple[Any, list[ConfigProblem]]:
    """Return an instance of ``cls`` from a section outside the schema, or None, and what is wrong with it."""
    completion = complete(node, Composition(), cls, path)
    reader = _Reader(completion.tree, Composition(), completion.known, locator)
    instance = reader.section(cls, completion.tree, path)
    return (None if instance is _INVALID else instance), reader.result.problems


class _Reader:
    def __init__(self, tree: Node, composition: Composition, known: Sequence[str], locator: Locator) -> None:
        self.result = Reading(run=None, tree=tree)
        self.composition = composition
        self.known = known
        self.locator = locator

    def section(self, cls: type, node: Node, path: str) -> Any:
        """Return an instance of ``cls``, or ``_INVALID`` where one of its keys is wrong."""
        if not isinstance(node.value, dict):
            self._wrong(path, node, describe_node(node), "a mapping")
            return _INVALID
        extra = self.composition.classes.get(path)
        declared = section_keys(cls, extra)
        values: dict[int, dict[str, Any]] = {0: {}, 1: {}}
        for name, keys in declared.items():
            for key, value in zip(keys, self._values(keys, node, join(path, name)), strict=True):
                values[int(key.owner is not cls)][name] = value
        for name, child in node.children.items():
            if name not in declared:
                self._undeclared(name, child, path, declared)
        if extra is not None and _INVALID not in values[1].values():
            self._component(extra, values[1], path, node)
        return _INVALID if _INVALID in values[0].values() else cls(**values[0])

    def _values(self, keys: tuple[Key, ...], section: Node, path: str) -> list[Any]:
        """The key's value as each of its declarations reads it."""
        key = keys[0]
        node = section.children.get(key.name)
        if node is None:
            if key.mark(DefaultsTo) is None:
                self._missing(path, section, key)
            return [_INVALID for _ in keys]
        if node.origin.written:
            self.result.followers[path] = node.origin.where
        if node.value is UNRESOLVED:
            return [_INVALID for _ in keys]
        if key.section is not None and not (key.optional and node.value is None):
            value = self.section(key.section, node, path)
            return [value for _ in keys]
        return self._leaf(keys, node, path)

    def _leaf(self, keys: tuple[Key, ...], node: Node, path: str) -> list[Any]:
        if _unresolved(node):
            return [_INVALID for _ in keys]
        read: list[Any] = []
        for key in keys:
            located = self.locator.locate(node, key.shape)
            if located is not node:
                self.result.tree = self.result.tree.set(path, located)
            try:
                read.append(key.shape.read(self.locator.resolve(located, key.shape)))
            except Mismatch as mismatch:
                hint = _hint(to_plain(node), key.shape, path) if node.shown is None else _hint_hidden(node, key.shape)
                plain = located is node and not is_hidden(node)
                found = mismatch.found if plain else describe_node(node)
                self._wrong(path, node, found, key.shape.describe(), hint)
                return [_INVALID for _ in keys]
        self.result.values[path] = read[0]
        return read

    def _component(self, cls: type, values: Mapping[str, Any], path: str, node: Node) -> None:
        try:
            self.result.instances[path] = cls(**values)
        except (ValueError, TypeError) as error:  # raised by a __post_init__
            found = ComponentFinding(**node.origin.at(path), message=f"{error}.")
            self.result.problems.append(found)

    def _undeclared(self, name: str, node: Node, path: str, declared: Mapping[str, Any]) -> None:
        """A key that neither the core nor the component declares."""
        if path not in self.composition.open:
            where = join(path, name)
            near = nearest_keys(where, self.known)
            self.result.problems.append(UnknownKey(**node.origin.at(where), candidates=near, known=tuple(declared)))

    def _missing(self, path: str, section: Node, key: Key) -> None:
        where = path.rpartition(".")[0]
        if where in self.composition.unfilled and key.owner is self.composition.classes.get(where):
            return
        origin = section.origin
        while where and origin.kind == "default":  # the whole section is missing: reported at its parent
            where = where.rpartition(".")[0]
            around = self.result.tree.find(where) if where else self.result.tree
            origin = around.origin if around is not None else origin
        self.result.problems.append(MissingKey(**origin.at(path), allowed=key.shape.describe()))

    def _wrong(self, path: str, node: Node, found: str, allowed: str, hint: str = "") -> None:
        problem = WrongValue(**node.origin.at(path), found=found, allowed=allowed, hint=hint)
        self.result.problems.append(problem)


def _unresolved(node: Node) -> bool:
    """Whether an interpolation below the node failed."""
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if not isinstance(node.value, (dict, list)):
        return node.value is UNRESOLVED
    return any(_unresolved(child) for child in children)


_SHARES = {
    "trainer.val_check_interval": "A number with a decimal point is a share of a pass in Lightning; here"
    " trainer.check_val_every_n_epoch: 1 validates after each pass."
}
"""Keys whose floats mean something else in Lightning than the same number as an integer → what to write."""


def _hint(value: Any, shape: Shape, path: str) -> str:
    """Return what to write instead, where it is clear what was meant."""
    members = getattr(shape, "members", (shape,))
    kinds = {member.type for member in members if isinstance(member, Scalar)}
    if isinstance(value, float) and path in _SHARES:
        return _SHARES[path]
    if kinds & {int, float} and _boundless(value):
        return "It must be finite."
    if isinstance(value, str) and kinds & {int, float, bool}:
        return "Write it without quotes." if _number_like(value) else ""
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"Write {int(value)}."
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in kinds and int not in kinds:
        return f"Write it in quotes: '{value}'."
    if isinstance(value, str) and any(isinstance(member, Items) for member in members):
        return f"Write a list: [{value}]."
    choices = [text for m in members if isinstance(m, Choice) for text in m.values if isinstance(text, str)]
    close = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"Did you mean {close[0]!r}?" if close else ""


def _hint_hidden(node: Node, shape: Shape) -> str:
    """Return how to read a variable as a number."""
    kinds = {member.type for member in getattr(shape, "members", (shape,)) if isinstance(member, Scalar)}
    if isinstance(node.value, str) and kinds & {int, float, bool} and str(node.shown).startswith("${oc.env:"):
        return f"The value of a variable is text: write ${{oc.decode:{node.shown}}}."
    return ""


def _number_like(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _boundless(value: Any) -> bool:
    """Whether the value is a ``nan`` or an ``inf``, as a number or as text."""
    try:
        return isinstance(value, (str, float)) and not math.isfinite(float(value))
    except ValueError:
        return False
