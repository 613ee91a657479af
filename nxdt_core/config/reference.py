"""The schema and a resolved configuration as text: reference in Markdown, JSON Schema, YAML with origins."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from nxdt_core.config.annotations import DefaultsTo
from nxdt_core.config.complete import section_keys
from nxdt_core.config.components import usable_class
from nxdt_core.config.schema import SLOTS, ResolvedConfig, RunConfig, Slot
from nxdt_core.config.secrets import Redaction
from nxdt_core.config.section import REQUIRED, Key, keys_of
from nxdt_core.config.tree import Node, Origin, Place, from_plain, join, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel, RegisteredComponent

__all__ = ["class_doc", "field_docs", "json_schema", "reference_markdown", "render_show"]


def field_docs(cls: Any) -> dict[str, str]:
    """Return one paragraph for each field that is documented; that of a subclass wins."""
    described = {name: info.description for name, info in cls.__pydantic_fields__.items()}
    found: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        found.update(_docs_of_module(klass.__module__).get(klass.__qualname__, {}))
    texts = {key.name: described.get(key.attribute) or found.get(key.attribute) for key in keys_of(cls).values()}
    return {name: " ".join(text.split()) for name, text in texts.items() if text}


def class_doc(cls: type) -> str:
    """Return the class's docstring; empty where it has none."""
    return inspect.cleandoc(cls.__doc__ or "")


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Class → field → text, for a module whose source can be had."""
    module = sys.modules.get(name)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError, SyntaxError):
        return {}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] if tree is not None else []
    return {node.name: _docs_of_class(node) for node in classes}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = below.value.value
    return found


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
    cells = (f"`{key.name}`", allowed, _default(key), doc)
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


_COLUMN = 48
"""Where comments start, unless a value is longer."""
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null)$)[a-z][\w./-]*|/[\w./-]+", re.IGNORECASE | re.ASCII)
"""Text that YAML takes for nothing else: words and paths."""


def render_show(resolved: ResolvedConfig, *, only_set: bool = False) -> str:
    """Return the YAML with ``# origin`` comments. ``only_set`` leaves out what is a default."""
    redact = Redaction(resolved.tree)
    lines = [f"# {resolved.source}, resolved"]
    lines += [f"# note: {note}" for note in resolved.notes]
    for key, node in resolved.tree.children.items():
        lines += _lines(key, node, 0, only_set, redact)
    return "\n".join(lines) + "\n"


def _lines(key: str, node: Node, depth: int, only_set: bool, redact: Redaction) -> list[str]:
    name = f"{'  ' * depth}{_scalar(key)}:"
    if node.children:
        below = [
            line for name, child in node.children.items() for line in _lines(name, child, depth + 1, only_set, redact)
        ]
        return [name, *below] if below else []
    if only_set and node.origin.kind == "default":
        return []
    text = f"{name} {_scalar(to_plain(node, shown=True))}"
    return [f"{text:<{_COLUMN}}  # {redact(str(node.origin))}"]


def _scalar(value: object) -> str:
    """One key or value in flow style on one line. Most need no dumper, which takes 0.1 ms for each."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is int or (isinstance(value, str) and _PLAIN.fullmatch(value)) or value in ([], {}):
        return str(value)
    # Here, not above: the dumper's regular expressions cost 5 ms, which loading need not pay.
    import yaml

    # The list around a value keeps the dumper from writing a document's end.
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
