"""Fills in every key that was left out: from the key that it follows, from the component, from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nxdt_core.config.annotations import DefaultsTo
from nxdt_core.config.fields.component_slots import Composition
from nxdt_core.config.fields.keys import REQUIRED, Key, is_model, keys_of
from nxdt_core.config.resolve.interpolation import has_interpolation
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Node, Origin, from_plain, join

__all__ = ["Completion", "complete", "section_keys"]

_DEFAULT = Origin(kind="default", where="")


@cache
def section_keys(core: type | None, extra: type | None) -> dict[str, tuple[Key, ...]]:
    """Return the keys of a section by name; two where the core and the component both declare one, the core's first."""
    found: dict[str, tuple[Key, ...]] = {}
    for cls in (core, extra):
        for name, key in (keys_of(cls) if cls is not None else {}).items():
            found[name] = (*found.get(name, ()), key)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """What a key that was left out gets."""

    key: Key
    """As the core declares it, where the component does so too."""
    default: Node | None
    """The component's default before the core's: who reads a key knows what it should be."""
    link: DefaultsTo | None
    """The key whose value it takes instead of a default."""
    null_is_unset: bool


@cache
def _fillings(core: type | None, extra: type | None) -> Mapping[str, _Filling]:
    """What each key of a section gets; worked out once, since nodes are never changed."""
    return {
        name: _Filling(
            key=keys[0],
            default=next((_default(key, extra) for key in reversed(keys) if key.default is not REQUIRED), None),
            link=keys[0].mark(DefaultsTo),
            null_is_unset=any(each.default is not REQUIRED or each.marks for each in keys)
            and not any(each.optional for each in keys),
        )
        for name, keys in section_keys(core, extra).items()
    }


def _default(key: Key, extra: type | None) -> Node:
    origin = Origin(kind="default", where=extra.__name__) if key.owner is extra and extra else _DEFAULT
    return from_plain(_plain(key.default), origin)


class Completion:
    """The filled tree, and every key path that it may have."""

    def __init__(self, given: Node, composition: Composition, root: type, path: str) -> None:
        self.composition = composition
        self.given = given
        self.links: list[tuple[str, str]] = []
        self.known: list[str] = []
        """Every key path of the schema, for suggestions."""
        self.tree = self._section(root, given, path)
        for path, source in self.links:
            if given.plain(path) is None and (found := self.tree.find(source)) is not None:
                self.tree = self.tree.set(path, _following(found, source))

    def _section(self, cls: type | None, node: Node | None, path: str) -> Node:
        extra = self.composition.classes.get(path)
        given = node.children if node is not None else {}
        filled: dict[str, Node] = {}
        declared = _fillings(cls, extra)
        for name, filling in declared.items():
            child = self._key(filling, given.get(name), join(path, name))
            if child is not None:
                filled[name] = child
        unknown = {name: child for name, child in given.items() if name not in filled and name not in declared}
        return Node({**filled, **unknown}, node.origin if node is not None else _DEFAULT)

    def _key(self, filling: _Filling, node: Node | None, path: str) -> Node | None:
        key = filling.key
        self.known.append(path)
        if node is not None and node.value is None and filling.null_is_unset:
            node = None
        if key.section is not None and (node is None or node.value is None or isinstance(node.value, dict)):
            absent = node is None or node.value is None
            if key.optional and absent:
                return node or Node(None, _DEFAULT)
            return self._section(key.section, node, path)
        if filling.link is not None:
            self.links.append((path, filling.link.key))
            return node
        return node or filling.default


def _following(node: Node, source: str) -> Node:
    """Return a node with the value of the key ``source``, which ``node`` holds."""
    value = f"${{{source}}}" if has_interpolation(node.value) else node.value
    written, came = node.origin.at(source)["place"], node.origin
    origin = Origin(kind="default", where=source, line=came.line, written=written, directory=came.directory)
    return Node(value, origin, node.shown)


def complete(given: Node, composition: Composition, root: type = RunConfig, path: str = "") -> Completion:
    """Fill ``given`` by the section ``root`` and what the components of ``composition`` add to it.

    ``path`` is the path of ``given``; keys follow others only from the root of the configuration.
    """
    return Completion(given, composition, root, path)


def _plain(value: Any) -> Any:
    if is_model(type(value)):
        return dict(_pairs(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _pairs(instance: Any) -> Iterator[tuple[str, Any]]:
    cls: Any = type(instance)
    for name in keys_of(cls):
        yield name, _plain(getattr(instance, keys_of(cls)[name].attribute))
