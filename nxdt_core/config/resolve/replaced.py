"""Keys of a component that a file or an override replaces by another: they go with the component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nxdt_core.config.fields.component_slots import SLOTS, Slot
from nxdt_core.config.fields.keys import Key, keys_of
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Node, join
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel, RegisteredComponent

__all__ = ["Replaced", "drop_replaced", "find_replaced"]

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
