"""Older spellings and dead keys, as the schema itself marks them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from nxdt_core.config.annotations import AliasOf, NoEffect, XlaOnly
from nxdt_core.config.fields.component_slots import SLOTS
from nxdt_core.config.fields.keys import Key, keys_of
from nxdt_core.config.resolve.alignment import SECTION, TARGETS, target_of
from nxdt_core.config.schema.legacy import LEGACY
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import join
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel
from nxdt_plugin_migrate.config.document import Document

__all__ = ["core_keys", "drop_dead_keys", "legacy_keys", "rename_aliases", "section_class"]

_CHECKPOINT = "the section checkpoint has all of saving and resuming"
_XLA = "engines of the XLA runtime read it; elsewhere it has no effect"


@cache
def core_keys() -> dict[str, Key]:
    """Return every key of the core's schema by path, sections included."""
    return dict(_walk(RunConfig, ""))


@cache
def legacy_keys() -> dict[str, Key]:
    """Return the keys of NxD Training that only components declare, by path."""
    return {join(section, name): key for section, cls in LEGACY.items() for name, key in keys_of(cls).items()}


def _walk(cls: type, path: str) -> Iterator[tuple[str, Key]]:
    for name, key in keys_of(cls).items():
        here = join(path, name)
        yield here, key
        if key.section is not None:
            yield from _walk(key.section, here)


def rename_aliases(document: Document) -> None:
    """Give aliases, and the parts of ``model_alignment_strategy``, the names that the schema has for them now."""
    for path, key in core_keys().items():
        alias = key.mark(AliasOf)
        if alias is None or path not in document.settings:
            continue
        if document.value(path) is None:
            document.moved[document.settings[path].source] = alias.key
            document.drop(path, "off", "null says that it is not set")
        else:
            document.move(path, alias.key, _CHECKPOINT if alias.key.startswith("checkpoint.") else "")
    for part, (section, name) in TARGETS.items():
        if document.has(f"{SECTION}.{part}"):
            for path in document.below(f"{SECTION}.{part}"):
                rest = path.removeprefix(f"{SECTION}.{part}").removeprefix(".")
                document.move(path, target_of(part, rest) if rest else section)
            if name is not None:
                document.put(f"{section}.name", name, f"{SECTION}.{part} asks for it")
    document.drop(SECTION, "unneeded", "it is empty")


def drop_dead_keys(document: Document, kernel: Kernel) -> None:
    """Leave out what has no effect, and say what has one on the XLA runtime alone."""
    for path in list(document.settings):
        key = core_keys().get(path) or legacy_keys().get(path)
        if key is None or _declared(path, document, kernel):
            continue
        dead = key.mark(NoEffect)
        if dead is not None:
            document.drop(path, "unneeded", dead.reason)
        elif key.mark(XlaOnly) is not None:
            document.remark(path, _XLA)


def _declared(path: str, document: Document, kernel: Kernel) -> bool:
    """Whether the selected component reads the key."""
    section, _, name = path.rpartition(".")
    cls = section_class(section, document, kernel)
    return cls is not None and name in keys_of(cls)


def section_class(section: str, document: Document, kernel: Kernel) -> type | None:
    """Return the dataclass of the component that a section selects; None where it declares none or cannot be had."""
    slot = next((slot for slot in SLOTS if slot.section == section), None)
    name = document.value(slot.key) if slot is not None else None
    if slot is None or not isinstance(name, str):
        return None
    try:
        return kernel.registry.get(slot.kind, name).load_config()
    except NxdtError:
        return None
