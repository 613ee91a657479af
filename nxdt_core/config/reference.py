"""The schema and a resolved configuration as text: documentation of keys, JSON Schema, YAML with origins."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from typing import Any

from nxdt_core.config.schema import SLOTS, ResolvedConfig, RunConfig, usable_class
from nxdt_core.config.secrets import Redaction
from nxdt_core.config.section import REQUIRED, Key, keys_of
from nxdt_core.config.tree import KeyPath, Place, Tree, join
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel

__all__ = ["class_doc", "field_docs", "json_schema", "render_show"]


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
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):
        return {}
    docs: dict[str, dict[str, str]] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        docs[node.name] = {
            field.target.id: below.value.value
            for field, below in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(below.value.value, str)
        }
    return docs


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
    everything = {name: _property(key, join(path, name), kernel, sections) for name, key in keys_of(cls).items()}
    closed = {"type": "object", "properties": everything, "additionalProperties": False}
    if slot is None:
        return {**closed, "description": class_doc(cls)} if class_doc(cls) else closed
    branches: list[dict[str, Any]] = []
    names: dict[str | None, None] = {}
    for component in kernel.registry.all(slot.kind):
        spelled = [component.record.name, *component.record.aliases]
        spelled += [f"{plugin}:{name}" for plugin in (component.plugin, component.dist) for name in spelled]
        names |= dict.fromkeys(spelled)
        try:
            own = usable_class(component, Place(place=component.dist, line=0, key=""))
        except NxdtError:  # its own section cannot be described; choosing it says why
            continue
        whole = {**keys_of(cls), **(keys_of(own) if own is not None else {})}
        keys = {name: _property(key, join(path, name), kernel, sections) for name, key in whole.items()}
        everything |= keys
        chosen = {"properties": {slot.selector: {"enum": spelled}}, "required": [slot.selector]}
        branches.append({"if": chosen, "then": {**closed, "properties": keys}})
    branches.append({"if": {"not": {"required": [slot.selector]}}, "then": {**closed, "properties": dict(everything)}})
    description = everything.get(slot.selector, {}).get("description", "")
    selector = {"anyOf": [{"enum": [*names, None]}, _INTERPOLATION], "description": description}
    schema = {
        "type": "object",
        "description": class_doc(cls),
        "properties": {slot.selector: selector},
        "allOf": branches,
    }
    return {"anyOf": [schema, {"type": "string", "description": f"short for {slot.selector}: …"}]}


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


_COLUMN = 48
"""Where comments start, unless a value is longer."""
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null)$)[a-z][\w./-]*|/[\w./-]+", re.IGNORECASE | re.ASCII)
"""Text that YAML takes for nothing else: words and paths."""


def render_show(resolved: ResolvedConfig, *, only_set: bool = False) -> str:
    """Return the YAML with ``# origin`` comments. ``only_set`` leaves out what is a default."""
    redact = Redaction(resolved.tree)
    lines = [f"# {resolved.source}, resolved"]
    lines += [f"# note: {note}" for note in resolved.notes]
    for key in resolved.tree.data:
        lines += _lines(resolved.tree, (key,), only_set, redact)
    return "\n".join(lines) + "\n"


def _lines(tree: Tree, path: KeyPath, only_set: bool, redact: Redaction) -> list[str]:
    name, value, origin = f"{'  ' * (len(path) - 1)}{_scalar(path[-1])}:", tree.get(path), tree.origins[path]
    if isinstance(value, dict) and value:
        below = [line for key in value for line in _lines(tree, (*path, key), only_set, redact)]
        return [name, *below] if below else []
    if only_set and origin.kind == "default":
        return []
    text = f"{name} {_scalar(tree.as_shown(path))}"
    return [f"{text:<{_COLUMN}}  # {redact(str(origin))}"]


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
