"""Which components a configuration selects, by name or by the rules that apply where it names none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.config.huggingface import architectures_of
from nxdt_core.config.schema import SLOTS, Composition, Slot, core_class
from nxdt_core.config.section import Key, keys_of
from nxdt_core.config.tree import Node, Origin, Place, join
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, BadComponentConfig, ConfigProblem
from nxdt_core.errors.plugins import AmbiguousComponent
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.registry import reading_model

__all__ = ["Replaced", "Selection", "drop_replaced", "find_replaced", "selecting_keys", "usable_class"]


_DEFAULT = "the default"
_RULE_KEYS = ("model.model_config", "checkpoint.uri", "data.tokenizer")
"""Keys that the rules below read in addition to the selectors."""


def selecting_keys(given: Node) -> tuple[str, ...]:
    """Return the keys whose values :class:`Selection` needs. A model without a name is sought by its whole section."""
    whole = () if given.find("model.name") else ("model",)
    return (*(slot.key for slot in SLOTS), *_RULE_KEYS, *whole)


class Selection:
    """The component of every slot, and the tree in which each is named.

    Args:
        given: What was written; names that follow from rules are added to it.
        view: The same with the core's defaults and with interpolations resolved; selectors are read from it.
        kernel: Knows the components.
        hf: The Hugging Face configuration that ``model.model_config`` names, or nothing.
        origin: Origin of problems with keys that are not written anywhere.
    """

    def __init__(self, given: Node, view: Node, kernel: Kernel, hf: Mapping[str, Any], origin: Origin) -> None:
        self.tree = given
        self.composition = Composition()
        """What completing and reading need to know."""
        self.problems: list[ConfigProblem] = []
        self.notes: list[str] = []
        for slot in SLOTS:
            around = slot.section.split(".")
            nodes = [given.find(".".join(around[: depth + 1])) for depth in range(len(around))]
            mappings = all(node is None or isinstance(node.value, (dict, type(None))) for node in nodes)
            if mappings and isinstance(view.plain(slot.key), (str, type(None))):
                self._choose(slot, view, kernel, hf, origin)
            else:  # reported when it is read
                self.composition.open.add(slot.section)

    def _choose(self, slot: Slot, view: Node, kernel: Kernel, hf: Mapping[str, Any], origin: Origin) -> None:
        written, key, name = self.tree.find(slot.key), slot.key, view.plain(slot.key)
        if written is None and slot.kind == "store" and (written := self.tree.find("checkpoint.uri")) is not None:
            key = "checkpoint.uri"
        written = written or self.tree.find(slot.section)
        place = (written.origin if written is not None else origin).at(key)
        why = ""
        try:
            if name is None:
                name, why = _implied_name(slot, view, kernel, hf)
            component = self.composition.components[slot.kind] = _component(slot, name, view, kernel)
            if component is not None and (cls := usable_class(component, {**place, "key": slot.key})) is not None:
                self.composition.classes[slot.section] = cls
        except NxdtError as error:
            note = f" The name follows from {why}." if why else ""
            found = error if isinstance(error, ConfigProblem) else BadComponentChoice(**place, error=error, note=note)
            self.problems.append(found)
            self.composition.open.add(slot.section)
        if why:
            origin = Origin(kind="default", where="" if why == _DEFAULT else f"by {why}")
            self.tree = self.tree.set(slot.key, Node(name, origin))
            if slot.kind == "model":
                self.notes.append(f"{slot.key}: not given; {name!r} follows from {why}")


def _component(slot: Slot, name: str | None, view: Node, kernel: Kernel) -> RegisteredComponent | None:
    if slot.kind == "store":
        uri = view.plain("checkpoint.uri")
        scheme, separator, _ = (uri if isinstance(uri, str) else "").partition("://")
        scheme = scheme if separator else "file"
        kernel.registry.check_scheme(scheme)
        if name is None:
            return kernel.registry.storage_for_scheme(scheme)
    return None if name is None else kernel.registry.get(slot.kind, name)


def _implied_name(slot: Slot, view: Node, kernel: Kernel, hf: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the name that a rule gives where the configuration gives none, and why; None and nothing: no rule does."""
    if slot.kind == "dataset":
        return "hf-data", _DEFAULT
    if slot.kind == "tokenizer":
        named = any(view.plain(f"data.tokenizer.{key}") is not None for key in ("type", "model"))
        return ("huggingface", "data.tokenizer.type") if named else (None, "")
    if slot.kind != "model":
        return None, ""
    architectures = architectures_of(hf)
    if not architectures:
        return "llama", _DEFAULT
    readers = kernel.registry.readers(architectures)
    if len(readers) > 1:
        raise AmbiguousComponent(
            kind="model",
            name=architectures[0],
            offers=tuple(component.qualified_name for component in readers),
            dists=tuple(f"{component.dist} {component.version}" for component in readers),
        )
    name = readers[0].record.name if readers else reading_model(architectures[0]) or "hf"
    return name, f"model.model_config ({architectures[0]})"


def usable_class(component: RegisteredComponent, place: Place) -> type | None:
    """Return the class of the component's section; ``place`` is that of the key that selects it.

    Raises:
        BadComponentChoice: it cannot be imported.
        BadComponentConfig: a field has a type that no YAML value can have.
    """
    from pydantic.errors import PydanticUserError  # a component that has a class has imported it

    try:
        cls = component.load_config()
    except NxdtError as error:
        raise BadComponentChoice(**place, error=error) from error
    if cls is None:
        return None
    try:
        cls.model_rebuild()  # type: ignore[attr-defined]
    except PydanticUserError as error:
        named = re.search(r"<class '(?:.*\.)?(\w+)'>", error.message)
        kind = f": {named[1]}" if named else ""
        reason = f"a key of {cls.__name__} has a type that no YAML value can be read into{kind}"
        name, dist = component.qualified_name, component.dist
        raise BadComponentConfig(**place, component=name, dist=dist, reason=reason) from error
    return cls


_FILE = "file://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A choice of a component that replaces one below it."""

    slot: Slot
    before: str
    after: str
    keys: tuple[str, ...]
    """Keys of the section that only the sources below give a value."""


def find_replaced(low: Node, high: Node) -> list[Replaced]:
    """Return where ``high`` names another component than ``low``, which it is about to be merged over."""
    found = []
    for slot in SLOTS:
        before, after = _name(low, slot) or _default(slot), _name(high, slot)
        section, above = low.find(slot.section), high.find(slot.section)
        if section is None or before is None or after is None or before == after:
            continue
        children = above.children if above is not None else {}
        given = {key for key, child in children.items() if child.value is not None}
        keys = tuple(key for key in section.children if key != slot.selector and key not in given)
        found.append(Replaced(slot=slot, before=before, after=after, keys=keys))
    return found


def drop_replaced(given: Node, replaced: Iterable[Replaced], kernel: Kernel) -> tuple[Node, list[str]]:
    """Take keys out of ``given`` that only the component that was replaced declares.

    Keys of the core, and those that both components declare, stay.

    Returns:
        The tree, and a note for each component whose keys were dropped.
    """
    notes = []
    for each in replaced:
        before, after = _declared(each.slot, each.before, kernel), _declared(each.slot, each.after, kernel)
        if before is None or after is None:
            continue
        core = _core_keys(each.slot.section)
        dropped = [key for key in each.keys if key in before and key not in after and key not in core]
        for key in dropped:
            given = given.without(join(each.slot.section, key))
        if dropped:
            names = ", ".join(dropped)
            notes.append(f"{each.slot.key}: {each.after!r} replaces {each.before!r}, whose keys are left out: {names}")
    return given, notes


def _name(tree: Node, slot: Slot) -> str | None:
    """The name that a source gives, or of a store the scheme of its address, with ``://``."""
    name, uri = tree.plain(slot.key), tree.plain("checkpoint.uri")
    if name is None and slot.kind == "store" and isinstance(uri, str):
        scheme, separator, _ = uri.partition("://")
        return f"{scheme}://" if separator else _FILE
    return name if isinstance(name, str) else None


def _default(slot: Slot) -> str | None:
    if slot.kind == "store":
        return _FILE
    if slot.kind == "tokenizer":
        return "huggingface"
    key = _core_keys(slot.section).get(slot.selector)
    return key.default if key is not None and isinstance(key.default, str) else None


def _core_keys(section: str) -> Mapping[str, Key]:
    cls = core_class(section)
    return keys_of(cls) if cls is not None else {}


def _declared(slot: Slot, name: str, kernel: Kernel) -> Mapping[str, Key] | None:
    """Keys of a component; None where they are not known."""
    try:
        component: RegisteredComponent = (
            kernel.registry.storage_for_scheme(name.removesuffix("://"))
            if name.endswith("://")
            else kernel.registry.get(slot.kind, name)
        )
        cls = component.load_config()
        return keys_of(cls) if cls is not None else {}
    except NxdtError:
        return None
