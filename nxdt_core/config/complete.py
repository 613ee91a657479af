"""From what was written to a tree in which every key has a value: one form for all, then defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from nxdt_core.config.annotations import DefaultsTo
from nxdt_core.config.interpolation import MANDATORY, has_interpolation, interpolate
from nxdt_core.config.schema import SLOTS, Composition, RunConfig
from nxdt_core.config.section import REQUIRED, Key, keys_of, section_paths
from nxdt_core.config.tree import Node, Origin, from_plain, join, merge, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, BadComponentConfig, ConfigProblem, MissingKey
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.hookspecs import ConfigDefaultsContext

__all__ = [
    "Completion",
    "find_ungiven",
    "merge_plugin_defaults",
    "section_keys",
    "tidy_given",
]

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
    found = {}
    for name, keys in section_keys(core, extra).items():
        default, null_is_unset = None, False
        for key in keys:
            if key.default is not REQUIRED:
                own = extra is not None and key.owner is extra
                default = from_plain(key.default, Origin(kind="default", where=key.owner.__name__) if own else _DEFAULT)
            null_is_unset |= key.default is not REQUIRED or bool(key.marks)
        null_is_unset &= not any(key.optional for key in keys)
        link = keys[0].mark(DefaultsTo)
        found[name] = _Filling(key=keys[0], default=default, link=link, null_is_unset=null_is_unset)
    return found


class Completion:
    """The filled tree, and every key path that it may have.

    Args:
        given: The tree to fill.
        composition: What the selected components add to the keys.
        root: The section to fill it by.
        path: Its path; keys follow others only from the root of the configuration.
    """

    def __init__(self, given: Node, composition: Composition, root: type = RunConfig, path: str = "") -> None:
        self.composition = composition
        self.given = given
        self.links: list[tuple[str, str]] = []
        self.known: list[str] = []
        """Every key path of the schema, for suggestions."""
        self.tree = self._section(root, given, path)
        for path, source in self.links:
            if given.plain(path) is None and (found := self.tree.find(source)) is not None:
                value = f"${{{source}}}" if has_interpolation(found.value) else found.value
                place, line, directory = found.origin.at(source)["place"], found.origin.line, found.origin.directory
                origin = Origin(kind="default", where=source, line=line, written=place, directory=directory)
                self.tree = self.tree.set(path, Node(value, origin, found.shown))

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


def tidy_given(given: Node) -> tuple[Node, list[ConfigProblem], dict[str, Origin]]:
    """Return the tree with whole sections that are interpolations replaced, with ``section: name`` spelled out as
    ``section: {name: …}``, and without ``???``; the problems; and where the keys are that said ``???``."""
    mandatory = {path: node.origin for path, node in given.leaf_nodes() if node.value == MANDATORY}
    for path in mandatory:
        given = given.without(path)
    taken = [
        path
        for path in section_paths(RunConfig)
        if (node := given.find(path)) is not None and has_interpolation(node.value)
    ]
    given, problems = interpolate(given, wanted=taken) if taken else (given, [])
    for slot in SLOTS:
        node = given.find(slot.section)
        if node is not None and isinstance(node.value, str):
            given = given.set(slot.section, Node({slot.selector: node}, node.origin))
    return given, problems, mandatory


def find_ungiven(mandatory: Mapping[str, Origin], tree: Node) -> Iterator[ConfigProblem]:
    """Yield an error for each key of ``mandatory`` that has no value but a default's."""
    for path, origin in mandatory.items():
        found = tree.find(path)
        if found is not None and found.origin.kind == "default":
            yield MissingKey(**origin.at(path), allowed=f"a value in place of {MANDATORY}")


def merge_plugin_defaults(given: Node, label: str, kernel: Kernel) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with what the hook ``nxdt_config_defaults`` gives below it; of several plugins the first wins."""
    try:
        context = ConfigDefaultsContext(config=to_plain(given), source=label)
        results = list(kernel.call("nxdt_config_defaults", context=context))
    except NxdtError as error:
        return given, [BadComponentChoice(**Origin(kind="plugin", where="").at(""), error=error)]
    problems: list[ConfigProblem] = []
    for plugin, defaults in results:
        origin = Origin(kind="plugin", where=plugin.name)
        if isinstance(defaults, Mapping):
            given = merge(from_plain(defaults, origin), given)
        else:
            reason = f"nxdt_config_defaults gave a {type(defaults).__name__}, not a mapping"
            fault = BadComponentConfig(**origin.at(""), component=plugin.name, dist=plugin.dist, reason=reason)
            problems.append(fault)
    return given, problems
