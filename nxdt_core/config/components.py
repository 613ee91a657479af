"""Which components a configuration selects, by name or by the rules that apply where it names none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxdt_core.config.huggingface import architectures_of
from nxdt_core.config.schema import SLOTS, Composition, RunConfig, Slot
from nxdt_core.config.section import Key, keys_of
from nxdt_core.config.tree import Node, Origin, Place, join
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, BadComponentConfig, ConfigProblem
from nxdt_core.errors.plugins import AmbiguousComponent
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.known import reading_model

__all__ = ["Replaced", "Selection", "drop_replaced", "find_replaced", "select", "selecting_keys", "usable_class"]


@dataclass(slots=True)
class Selection:
    """The components by slot, and the tree in which each is named."""

    tree: Node
    components: dict[str, RegisteredComponent | None] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    problems: list[ConfigProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def composition(self) -> Composition:
        """What completing and reading need to know."""
        return Composition(components=self.components, classes=self.classes, open=frozenset(self.open))


_DEFAULT = "the default"

_RULE_KEYS = ("model.model_config", "checkpoint.uri", "data.tokenizer")
"""Keys that the rules below read in addition to the selectors."""


def selecting_keys(given: Node) -> tuple[str, ...]:
    """Return the keys whose values :func:`select` needs. A model without a name is sought by its whole section."""
    whole = () if given.find("model.name") else ("model",)
    return (*(slot.key for slot in SLOTS), *_RULE_KEYS, *whole)


def select(given: Node, view: Node, kernel: Kernel, hf: Mapping[str, Any], origin: Origin) -> Selection:
    """Select the component of every slot.

    Args:
        given: What was written; names that follow from rules are added to it.
        view: The same with the core's defaults and with interpolations resolved; selectors are read from it.
        kernel: Knows the components.
        hf: The Hugging Face configuration that ``model.model_config`` names, or nothing.
        origin: Origin of problems with keys that are not written anywhere.
    """
    selection = Selection(tree=given)
    for slot in SLOTS:
        name = view.plain(slot.key)
        if _no_mapping(given, slot.section):  # reported when it is read, as are selectors that are not text
            selection.open.add(slot.section)
            continue
        if not isinstance(name, (str, type(None))):
            selection.open.add(slot.section)
            continue
        written, key = _written(given, slot)
        place = written.origin if written is not None else origin
        implied: Implied | None = None
        try:
            implied = _implied_name(slot, view, kernel, hf) if name is None else None
            component = _component(slot, implied.name if implied else name, view, kernel)
        except NxdtError as error:
            note = f" The name follows from {implied.why}." if implied else ""
            selection.problems.append(BadComponentChoice(**place.at(key), error=error, note=note))
            selection.open.add(slot.section)
        else:
            selection.components[slot.kind] = component
            _take_class(selection, slot, component, place)
        if implied is not None and slot.kind == "model":
            selection.notes.append(f"{slot.key}: not given; {implied.name!r} follows from {implied.why}")
        if implied is not None:
            selection.tree = selection.tree.set(slot.key, Node(implied.name, implied.origin))
    return selection


def _no_mapping(given: Node, section: str) -> bool:
    """Whether the section, or one around it, is something else than a mapping."""
    parts = section.split(".")
    around = [given.find(".".join(parts[: depth + 1])) for depth in range(len(parts))]
    return any(node is not None and not isinstance(node.value, (dict, type(None))) for node in around)


def _written(given: Node, slot: Slot) -> tuple[Node | None, str]:
    """What was written that selects the component, and its key."""
    uri = given.find("checkpoint.uri")
    if slot.kind == "store" and given.find(slot.key) is None and uri is not None:
        return uri, "checkpoint.uri"
    return given.find(slot.key) or given.find(slot.section), slot.key


def _component(slot: Slot, name: str | None, view: Node, kernel: Kernel) -> RegisteredComponent | None:
    if slot.kind == "store":
        return _storage(name, view, kernel)
    return None if name is None else kernel.registry.get(slot.kind, name)


@dataclass(frozen=True, slots=True)
class Implied:
    """A name that a rule gives where the configuration gives none."""

    name: str
    why: str
    plugin: str = ""

    @property
    def origin(self) -> Origin:
        """Return where the name comes from, for ``nxdt config show``."""
        if self.plugin:
            return Origin(kind="plugin", where=self.plugin)
        return Origin(kind="default", where="" if self.why == _DEFAULT else f"by {self.why}")


def _implied_name(slot: Slot, view: Node, kernel: Kernel, hf: Mapping[str, Any]) -> Implied | None:
    if slot.kind == "model":
        return _model_name(kernel, hf)
    if slot.kind == "dataset":
        return Implied("hf-data", _DEFAULT)
    if slot.kind == "tokenizer":
        section = view.find("data.tokenizer")
        given = section.children if section is not None else {}
        if any(key in given and given[key].value is not None for key in ("type", "model")):
            return Implied("huggingface", "data.tokenizer.type")
    return None


def _model_name(kernel: Kernel, hf: Mapping[str, Any]) -> Implied:
    architectures = architectures_of(hf)
    readers = kernel.registry.readers(architectures)
    if readers:
        return Implied(_only(readers, architectures[0]).record.name, f"model.model_config ({architectures[0]})")
    if architectures:
        return Implied(reading_model(architectures[0]) or "hf", f"model.model_config ({architectures[0]})")
    return Implied("llama", _DEFAULT)


def _only(readers: Sequence[RegisteredComponent], architecture: str) -> RegisteredComponent:
    if len(readers) > 1:
        raise AmbiguousComponent(
            kind="model",
            name=architecture,
            offers=tuple(component.qualified_name for component in readers),
            dists=tuple(f"{component.dist} {component.version}" for component in readers),
        )
    return readers[0]


def _storage(name: str | None, view: Node, kernel: Kernel) -> RegisteredComponent:
    uri = view.plain("checkpoint.uri")
    uri = uri if isinstance(uri, str) else ""
    scheme, separator, _ = uri.partition("://")
    scheme = scheme if separator else "file"
    kernel.registry.check_scheme(scheme)
    if name is not None:
        return kernel.registry.get("store", name)
    return kernel.registry.storage_for_scheme(scheme)


def _take_class(selection: Selection, slot: Slot, component: RegisteredComponent | None, origin: Origin) -> None:
    """Import the class of the component's section and see that its annotations can be read."""
    if component is None:
        return
    try:
        cls = usable_class(component, origin.at(slot.key))
    except ConfigProblem as problem:
        selection.problems.append(problem)
        selection.open.add(slot.section)
        return
    if cls is not None:
        selection.classes[slot.section] = cls


def _type_named(message: str) -> str:
    """Return the type that pydantic's error names, without its module."""
    found = re.search(r"<class '(?:.*\.)?(\w+)'>", message)
    return f": {found[1]}" if found else ""


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
        reason = f"a key of {cls.__name__} has a type that no YAML value can be read into{_type_named(error.message)}"
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
    """Keys that the core declares in a section."""
    cls: type | None = RunConfig
    for part in section.split("."):
        key = keys_of(cls).get(part) if cls is not None else None
        cls = key.section if key is not None else None
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
