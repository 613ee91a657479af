"""From the filled tree to sections, with every wrong type, unknown key and missing key on the way.

Paths are made absolute: in a file they start at that file's directory, elsewhere at the working directory.
``package://`` stays as it is in the tree, so that a saved configuration loads on other machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from nxdt_core.config.annotations import DefaultsTo
from nxdt_core.config.complete import Completion, section_keys
from nxdt_core.config.interpolation import UNRESOLVED
from nxdt_core.config.schema import Composition
from nxdt_core.config.secrets import describe_node, is_hidden
from nxdt_core.config.section import LISTS, Key, is_model, keys_of, members, nearest_keys, read_section
from nxdt_core.config.sources import PACKAGE_SCHEME, PackageNotFound, resolve_path
from nxdt_core.config.tree import (
    LARGEST_INTEGER,
    MASK,
    KeyPath,
    Node,
    describe_value,
    dotted,
    join,
    mapped,
    to_plain,
    walk,
)
from nxdt_core.errors.configuration import ComponentFinding, ConfigProblem, MissingKey, UnknownKey, WrongValue
from nxdt_core.protocols.batch import LARGEST

__all__ = ["Reading", "located", "read_part"]


class Mismatch(Exception):
    """A value that a path or a number cannot have; the text says what it is."""


_NAME_BYTES = 255
"""Of a name within a path, which is what Linux accepts."""


def located(node: Node) -> Node:
    """Return the node with its relative paths made absolute."""
    return mapped(node, _located)


def _located(node: Node) -> Node:
    value, shown = node.value, node.shown
    if not isinstance(value, str) or not value or value.startswith("/") or "://" in value:
        return node
    if shown not in (None, MASK) and not value.startswith("~"):
        shown = f"{resolve_path('.', node.origin.directory)}/{shown}"
    return replace(node, value=str(resolve_path(value, node.origin.directory)), shown=shown)


def _usable(node: Node) -> Node:
    """Return the node of a path with ``package://`` made real.

    Raises:
        Mismatch: the package is not installed, or the operating system does not accept the path: it raises an error
            even at the question whether others exist.
    """
    text = node.value
    if not isinstance(text, str):
        return node
    names = text.encode(errors="replace").split(b"/")
    if not text or "\0" in text or any(len(name) > _NAME_BYTES for name in names):
        raise Mismatch(describe_value(text))
    try:
        return replace(node, value=str(resolve_path(text))) if text.startswith(PACKAGE_SCHEME) else node
    except PackageNotFound as error:
        raise Mismatch(f"{text!r}, but {error}") from None


def _on_paths(keys: tuple[Key, ...], node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the node with its paths changed, also those of sections in a mapping."""
    if any(key.holds_path for key in keys):
        return mapped(node, change)
    if not isinstance(node.value, dict):
        return node
    inner = next((part for part in get_args(keys[0].annotation) if is_model(part)), None)
    if inner is None:
        return node

    def section(child: Node) -> Node:
        found = {
            name: _on_paths((keys_of(inner)[name],), each, change) if name in keys_of(inner) else each
            for name, each in child.children.items()
        }
        return replace(child, value=found) if isinstance(child.value, dict) else child

    return replace(node, value={name: section(child) for name, child in node.value.items()})


def read_part(cls: type, node: Node, path: str) -> tuple[Any, list[ConfigProblem]]:
    """Return an instance of ``cls`` from a section outside the schema, or None, and what is wrong with it."""
    completion = Completion(node, Composition(), cls, path)
    reading = Reading(completion.tree, Composition(), completion.known)
    return reading.read(cls, completion.tree, path), reading.problems


class Reading:
    """The sections, values and problems that reading a configuration gave.

    Args:
        tree: the filled tree.
        composition: the selected components, whose sections are read next to the core's.
        known: every key path that the tree may have, for suggestions.
    """

    def __init__(self, tree: Node, composition: Composition, known: Sequence[str]) -> None:
        self.tree = tree
        """The tree with paths made absolute."""
        self.values: dict[str, Any] = {}
        """Plain value by key path, lists as tuples; wrong ones are absent."""
        self.instances: dict[str, Any] = {}
        """By section: an instance of the component's class."""
        self.problems: list[ConfigProblem] = []
        self.followers: dict[str, str] = {}
        """Key → key that it takes its value from: a wrong value is reported at the latter."""
        self._composition = composition
        self._known = known
        self._keys: dict[str, tuple[Key, Node]] = {}
        """By path: each key that has a value, and the value."""
        self._order: dict[str, int] = {}
        """Paths in the order in which they are visited: problems are reported in it."""
        self._absolute: set[str] = set()
        """Paths of keys whose relative path was made absolute."""
        self._bad: set[str] = set()
        """Paths of keys with a problem."""
        self._parts: dict[str, dict[str, Any]] = {}
        """By path of a section: the plain values of its component's keys."""

    def read(self, cls: type, node: Node, path: str) -> Any:
        """Return an instance of ``cls``, or None where one of its keys is wrong; components' are in ``instances``."""
        plain = self._section(cls, node, path)
        instance = self._instance(cls, plain, path)
        for section, component in self._composition.classes.items():
            if section in self._parts:
                found = self._instance(component, self._parts[section], section)
                if found is not None and self._complete(component, section):
                    self.instances[section] = found
        for where in self._bad:
            self.values.pop(where, None)
        self.problems.sort(key=lambda problem: self._order.get(problem.key, 0))
        return instance

    def _section(self, cls: type, node: Node, path: str) -> dict[str, Any]:
        """Return the plain values of the keys that ``cls`` declares; those of the component go to ``_parts``."""
        if not isinstance(node.value, dict):
            self._wrong(path, node, describe_node(node), "a mapping")
            return {}
        extra = self._composition.classes.get(path)
        plain: dict[str, Any] = {}
        part = self._parts.setdefault(path, {}) if extra is not None else {}
        declared = section_keys(cls, extra)
        for name, keys in declared.items():
            for key, value in self._values(keys, node, join(path, name)):
                (plain if key.owner is cls else part)[name] = value
        for name, child in node.children.items():
            if name not in declared and path not in self._composition.open:
                where = join(path, name)
                self._order.setdefault(where, len(self._order))
                near = nearest_keys(where, self._known)
                self.problems.append(UnknownKey(**child.origin.at(where), candidates=near, known=tuple(declared)))
        return plain

    def _values(self, keys: tuple[Key, ...], section: Node, path: str) -> Iterator[tuple[Key, Any]]:
        """The key's plain value for each of its declarations; nothing where there is none."""
        self._order.setdefault(path, len(self._order))
        key, node = keys[0], section.children.get(keys[0].name)
        if node is None:
            if key.mark(DefaultsTo) is None:
                self._missing(path, section, key)
            self._bad.add(path)
            return
        if node.origin.written:
            self.followers[path] = node.origin.where
        if not isinstance(node.value, dict) and any(each.value is UNRESOLVED for _, each in walk(node)):
            self._bad.add(path)  # a mapping's keys say so one by one
            return
        self._keys[path] = key, node
        if key.section is not None and not (key.optional and node.value is None):
            for each in keys:
                yield each, self._section(key.section, node, path)
            return
        try:
            value = self._leaf(keys, node, path)
        except Mismatch as mismatch:
            self._wrong(path, node, str(mismatch), key.describe())
            return
        self.values[path] = tuple(value) if isinstance(value, list) else value
        for each in keys:
            yield each, value

    def _leaf(self, keys: tuple[Key, ...], node: Node, path: str) -> Any:
        absolute = _on_paths(keys, node, _located)
        if absolute != node:
            self.tree = self.tree.set(path, absolute)
            self._absolute.add(path)
        node = _on_paths(keys, absolute, _usable)
        for _, each in walk(node):
            if type(each.value) is int and not -LARGEST_INTEGER - 1 <= each.value <= LARGEST_INTEGER:
                raise Mismatch("an integer of more than 64 bits")
            if type(each.value) is float and LARGEST < abs(each.value) < math.inf:
                raise Mismatch("a number beyond ±1e30")
        return to_plain(node)

    def _instance(self, cls: type, plain: Mapping[str, Any], path: str) -> Any:
        try:
            instance, faults = read_section(cls, plain)
        except ValueError as error:  # raised by the section itself
            section = self.tree.find(path) if path else self.tree
            origin = (section or self.tree).origin
            self.problems.append(ComponentFinding(**origin.at(path), message=f"{error}."))
            return None
        for inside, found in faults.items():
            self._fault(path, inside, found)
        return instance

    def _fault(self, path: str, inside: KeyPath, found: str) -> None:
        """Report a wrong value at its key, unless something is reported there already."""
        where = join(path, dotted(inside))
        if where not in self._keys or where in self._bad:
            return
        key, node = self._keys[where]
        hint = _hint(node, key, where) if node.shown is None else _hint_hidden(node, key)
        hidden = is_hidden(node) or where in self._absolute
        self._wrong(where, node, describe_node(node) if hidden else found, key.describe(), hint)

    def _complete(self, cls: type, path: str) -> bool:
        """Return whether all values of a section were read: what it says of its defaults instead would mislead."""
        own = {join(path, name) for name in keys_of(cls)}
        return not any(where in own or any(where.startswith(f"{key}.") for key in own) for where in self._bad)

    def _missing(self, path: str, section: Node, key: Key) -> None:
        where = path.rpartition(".")[0]
        if where in self._composition.unfilled and key.owner is self._composition.classes.get(where):
            return
        origin = section.origin
        while where and origin.kind == "default":  # the whole section is missing: reported at its parent
            where = where.rpartition(".")[0]
            around = self.tree.find(where) if where else self.tree
            origin = around.origin if around is not None else origin
        self.problems.append(MissingKey(**origin.at(path), allowed=key.describe()))

    def _wrong(self, path: str, node: Node, found: str, allowed: str, hint: str = "") -> None:
        self._bad.add(path)
        problem = WrongValue(**node.origin.at(path), found=found, allowed=allowed, hint=hint)
        self.problems.append(problem)


_SHARES = {
    "trainer.val_check_interval": "A number with a decimal point is a share of a pass in Lightning; here"
    " trainer.check_val_every_n_epoch: 1 validates after each pass."
}
"""Keys whose floats mean something else in Lightning than the same number as an integer → what to write."""


def _hint(node: Node, key: Key, path: str) -> str:
    """Return what to write instead, where it is clear what was meant."""
    value = to_plain(node)
    found = members(key.annotation)
    kinds = {bool, int, float, str} & {each for each in found if isinstance(each, type)}
    if isinstance(value, float) and path in _SHARES:
        return _SHARES[path]
    if isinstance(value, dict):
        joined = next((name for name, each in value.items() if each is None and ":" in name), "")
        return f"Write a space after the colon: {{{joined.replace(':', ': ', 1)}}}." if joined else ""
    if kinds & {int, float} and _boundless(value):
        return "It must be finite."
    if isinstance(value, str) and kinds & {int, float, bool}:
        return "Write it without quotes." if _number_like(value) else ""
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"Write {int(value)}."
    quoted = str in kinds and int not in kinds and not key.holds_path
    if quoted and isinstance(value, (int, float)) and not isinstance(value, bool):
        text = f"'{node.origin.text or value}'"  # a shell removes the outer quotes
        return (
            f'Write it in quotes: {path}="{text}".'
            if node.origin.kind == "override"
            else f"Write it in quotes: {text}."
        )
    if isinstance(value, str) and any((get_origin(each) or each) in LISTS for each in found):
        return f"Write a list: [{value}]."
    choices = [text for each in found if get_origin(each) is Literal for text in get_args(each) if type(text) is str]
    close = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"Did you mean {close[0]!r}?" if close else ""


def _hint_hidden(node: Node, key: Key) -> str:
    """Return how to read a variable as a number."""
    numbers = {int, float, bool} & {each for each in members(key.annotation) if isinstance(each, type)}
    if isinstance(node.value, str) and numbers and str(node.shown).startswith("${oc.env:"):
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
