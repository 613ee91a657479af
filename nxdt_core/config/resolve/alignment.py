"""Spreads ``model_alignment_strategy`` over the sections that it is an older spelling of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from nxdt_core.config.fields.keys import keys_of
from nxdt_core.config.resolve.interpolation import has_interpolation
from nxdt_core.config.schema.alignment import DpoKeys, OrpoKeys, PeftKeys, SftKeys
from nxdt_core.config.sources.node import Node, Origin, join

__all__ = ["SECTION", "TARGETS", "Pair", "data_of", "link", "spread_alignment", "target_of"]

SECTION = "model_alignment_strategy"

Pair = tuple[str, str]
"""Two key paths that must say the same."""

TARGETS = {
    "sft": ("data", None),
    "dpo": ("objective", "dpo"),
    "orpo": ("objective", "orpo"),
    "peft": ("adapter", "lora"),
}
"""Part → section that it goes to, and the component's name that its presence means."""


_OF_DATA = frozenset({"max_prompt_length", "truncation_mode"})
"""Keys of preference training that say how the records are cut."""

_PARTS: Mapping[str, type] = {"sft": SftKeys, "dpo": DpoKeys, "orpo": OrpoKeys, "peft": PeftKeys}


def target_of(part: str, key: str) -> str:
    """Return the current key that corresponds to ``key`` of a part."""
    return f"{'data' if key in _OF_DATA else TARGETS[part][0]}.{key}"


def data_of(parts: Iterable[str]) -> str:
    """Return the dataloader of a strategy with these parts."""
    return "preference" if {"dpo", "orpo"} & set(parts) else "sft-chat"


def link(tree: Node, source: str, kind: Literal["alias", "default"] = "alias") -> Node | None:
    """Return a node that takes its value from the key ``source``; None where that key does not exist."""
    found = tree.find(source)
    if found is None:
        return None
    value = f"${{{source}}}" if has_interpolation(found.value) else found.value
    written, came = found.origin.at(source)["place"], found.origin
    origin = Origin(kind=kind, where=source, line=came.line, written=written, directory=came.directory)
    return Node(value, origin, found.shown)


def spread_alignment(tree: Node) -> tuple[Node, list[Pair]]:
    """Return the tree with each part's keys in their new sections, and the pairs that were given in both places."""
    pairs: list[Pair] = []
    strategy = tree.find(SECTION)
    for part, node in (strategy.children if strategy else {}).items():
        if part not in TARGETS or not isinstance(node.value, dict):
            continue
        section, name = TARGETS[part]
        known = keys_of(_PARTS[part])
        written = node.origin.at("")["place"]
        place = Origin(kind="alias", where=join(SECTION, part), line=node.origin.line, written=written)
        if name is not None and tree.plain(f"{section}.name") is None:
            tree = tree.set(f"{section}.name", Node(name, place))
        for key, child in node.children.items():
            target = target_of(part, key)
            if child.value is None or key not in known:  # an unknown key is reported with its own line
                continue
            if tree.find(target) is not None:
                pairs.append((target, join(place.where, key)))
            elif linked := link(tree, join(place.where, key)):
                tree = tree.set(target, linked)
    return tree, pairs
