"""The YAML reference in Markdown, written from the sections: one table per section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nxdt_core.config.annotations import DefaultsTo, Deprecated
from nxdt_core.config.fields.component_slots import SLOTS
from nxdt_core.config.fields.docs import class_doc, field_docs
from nxdt_core.config.fields.keys import REQUIRED, Key, keys_of
from nxdt_core.config.resolve.select import usable_class
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Origin, Place, from_plain, join, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel

__all__ = ["reference_markdown"]

_HEAD = ("| key | value | default | meaning |", "|---|---|---|---|")


def reference_markdown(kernel: Kernel | None = None) -> str:
    """Return the tables of every key of the core and, with a kernel, of the components that it knows."""
    lines = ["# YAML reference", ""]
    for path, cls in _sections(RunConfig, ""):
        lines += [f"## `{path}`" if path else "## Top level", "", class_doc(cls), "", *_table(cls), ""]
    if kernel is not None:
        lines += ["# Keys of components", "", *_components(kernel)]
    return "\n".join(lines).rstrip() + "\n"


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    yield path, cls
    for name, key in keys_of(cls).items():
        if key.section is not None:
            yield from _sections(key.section, join(path, name))


def _components(kernel: Kernel) -> Iterator[str]:
    for slot in SLOTS:
        for component in kernel.registry.all(slot.kind):
            try:
                cls = usable_class(component, Place(place=component.dist, line=0, key=""))
            except NxdtError:  # `nxdt plugins show` reports what is wrong with it
                continue
            record = component.record
            yield from (f"## `{slot.key}: {record.name}`", "", f"{record.summary} ({component.dist}).", "")
            if cls is not None and keys_of(cls):
                yield from (*_table(cls), "")


def _table(cls: type) -> list[str]:
    docs = field_docs(cls)
    return [*_HEAD, *(_row(key, docs.get(name, "")) for name, key in keys_of(cls).items())]


def _row(key: Key, doc: str) -> str:
    allowed = "section" if key.section is not None else key.describe()
    cells = (f"`{key.name}`", allowed, _default(key), " ".join([doc, *_remarks(key)]).strip())
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    follows = key.mark(DefaultsTo)
    if follows is not None:
        return f"`{follows.key}`"
    if key.section is not None:
        return "`null`" if key.optional else ""
    return "required" if key.default is REQUIRED else f"`{_literal(key.default)}`"


def _literal(value: Any) -> str:
    plain = to_plain(from_plain(value, Origin(kind="default", where="")))
    if plain is None or isinstance(plain, bool):
        return {None: "null", True: "true", False: "false"}[plain]
    return str(plain)


def _remarks(key: Key) -> Iterator[str]:
    going = key.mark(Deprecated)
    if going is not None:
        yield f"Deprecated, goes in nxdt-core {going.goes}: use {going.use}."
