"""JSON Schema of the configuration, for editors: descriptions, completion, and what no key may be.

It covers keys and types. What only loading knows (combinations, required keys that may come from the command
line) is left to ``nxdt config check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nxdt_core.config.fields.component_slots import SLOTS, Slot
from nxdt_core.config.fields.docs import class_doc, field_docs
from nxdt_core.config.fields.keys import REQUIRED, Key
from nxdt_core.config.resolve.defaults import section_keys
from nxdt_core.config.resolve.select import usable_class
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.sources.node import Place, join
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel, RegisteredComponent

__all__ = ["json_schema"]

_INTERPOLATION = {"$ref": "#/$defs/interpolation"}


def json_schema(kernel: Kernel) -> dict[str, Any]:
    """Return the schema for the core and the components of all usable plugins (draft 2020-12)."""
    sections: dict[str, Any] = {}
    run = _section(RunConfig, "", kernel, sections)
    interpolation = {"type": "string", "pattern": r"\$\{.+\}", "description": "another key's value"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nxdt run",
        **run,
        "$defs": {"interpolation": interpolation, **sections},
    }


def _section(cls: type, path: str, kernel: Kernel, sections: dict[str, Any]) -> dict[str, Any]:
    """An object; where it selects a component, one branch for each component. The schemas of sections below it are put
    into ``sections``: each is needed in many branches, and written out there they would make megabytes."""
    slot = next((slot for slot in SLOTS if slot.section == path), None)
    if slot is None:
        return _closed(_properties(cls, None, path, kernel, sections), class_doc(cls))
    branches = []
    everything = _properties(cls, None, path, kernel, sections)
    for component, extra in _usable(kernel.registry.all(slot.kind)):
        properties = _properties(cls, extra, path, kernel, sections)
        everything = {**everything, **properties}
        branches.append({"if": _named(slot, component), "then": _closed(properties)})
    unnamed = {"not": {"required": [slot.selector]}}
    branches.append({"if": unnamed, "then": _closed(everything)})
    names = {"properties": {slot.selector: _selector(slot, kernel, everything)}}
    whole = {"type": "object", "description": class_doc(cls), **names, "allOf": branches}
    return {"anyOf": [whole, {"type": "string", "description": f"short for {slot.selector}: …"}]}


def _usable(components: Iterable[RegisteredComponent]) -> Iterable[tuple[RegisteredComponent, type | None]]:
    for component in components:
        try:
            yield component, usable_class(component, Place(place=component.dist, line=0, key=""))
        except NxdtError:  # its own section cannot be described; choosing it says why
            continue


def _spellings(component: RegisteredComponent) -> list[str]:
    names = [component.record.name, *component.record.aliases]
    return [*names, *(f"{plugin}:{name}" for plugin in (component.plugin, component.dist) for name in names)]


def _named(slot: Slot, component: RegisteredComponent) -> dict[str, Any]:
    return {"properties": {slot.selector: {"enum": _spellings(component)}}, "required": [slot.selector]}


def _selector(slot: Slot, kernel: Kernel, properties: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for component in kernel.registry.all(slot.kind) for name in _spellings(component)]
    description = properties.get(slot.selector, {}).get("description", "")
    return {"anyOf": [{"enum": [*dict.fromkeys(names), None]}, _INTERPOLATION], "description": description}


def _closed(properties: Mapping[str, Any], description: str = "") -> dict[str, Any]:
    closed = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**closed, "description": description} if description else closed


def _properties(cls: type, extra: type | None, path: str, kernel: Kernel, sections: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, keys in section_keys(cls, extra).items():
        found[name] = _property(keys[-1], join(path, name), kernel, sections)
    return found


def _property(key: Key, path: str, kernel: Kernel, sections: dict[str, Any]) -> dict[str, Any]:
    if key.section is not None:
        name = f"{path}:{key.section.__module__}.{key.section.__qualname__}"
        if name not in sections:
            sections[name] = _section(key.section, path, kernel, sections)
        return {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
    shape = key.json_schema()
    null = [] if key.default is REQUIRED else [{"type": "null"}]
    described = {"anyOf": [shape, *null, _INTERPOLATION]} if shape else {}
    text = field_docs(key.owner).get(key.name, "")
    return {**described, "description": text} if text else described
