"""What is shown of a configuration: documentation of keys, JSON Schema, YAML with origins; and what is not shown.

Hidden are the values of secret fields and of the environment, and credentials in addresses.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import yaml

from nxdt_core.config.schema import SLOTS, ResolvedConfig, RunConfig, usable_class
from nxdt_core.config.section import REQUIRED, Key, Secret, keys_of, marked
from nxdt_core.config.tree import MASK, KeyPath, Tree, dotted, join, walk
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigProblem, CredentialsInAddress, SecretNotKept
from nxdt_core.kernel import Kernel

_INTERPOLATION = {"$ref": "#/$defs/interpolation"}
_COLUMN = 48
"""Where comments start, unless a value is longer."""
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null)$)[a-z][\w./-]*|/[\w./-]+", re.IGNORECASE | re.ASCII)
"""Text that YAML takes for nothing else: words and paths."""
_SCHEME = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,63}):"  # bounded: a long value would take the square of its length
_USER = (
    r"(?:[^/?#@\s'\"]*@(?:[^/?#@\s'\"]*@)*"  # before the host
    r"|[^/?#@:\s'\"]+:(?!\d+(?:[/?#]|$))[^@\s'\"]*@)"  # a secret key of AWS may hold a slash
)
_CREDENTIALS = re.compile(f"{_SCHEME}//{_USER}")
_SHOWN = re.compile(f"{_SCHEME}//?{_USER}")
"""In messages: an address that was taken for a path has one slash less."""
_REFERENCE = re.compile(r"(?:[^:@{}$]*:)?\$\{oc\.env:\w+\}@")
"""Credentials whose secret part is a reference to a variable, after a user name that may be literal."""
_WORD = re.compile(r"[^\s'\"]+")
"""Text that may contain an address."""
_VARIABLE = re.compile(r"oc\.env\s*:\s*([^\s,{}$]+)")
_SHORTEST = 6
"""Characters of a value that is looked for within other text: shorter ones are part of ordinary words."""
_HIDDEN: dict[str, str] = {}
"""Values that configurations of this process hide → what is shown in their place."""


def field_docs(cls: Any) -> dict[str, str]:
    """Return one paragraph for each field that is documented; that of a subclass wins."""
    described = {name: info.description for name, info in cls.__pydantic_fields__.items()}
    docs: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        docs.update(_docs_of_module(klass.__module__).get(klass.__qualname__, {}))
    texts = {key.name: described.get(key.attribute) or docs.get(key.attribute) for key in keys_of(cls).values()}
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
            component_cls = usable_class(component)
        except NxdtError:  # its own section cannot be described; choosing it says why
            continue
        whole = {**keys_of(cls), **(keys_of(component_cls) if component_cls is not None else {})}
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


def render_show(resolved: ResolvedConfig, *, only_set: bool = False) -> str:
    """Return the YAML with ``# origin`` comments. ``only_set`` leaves out what is a default."""
    lines = [f"# {resolved.source}, resolved"]
    lines += [f"# note: {note}" for note in resolved.notes]
    for key in resolved.tree.data:
        lines += _lines(resolved.tree, (key,), only_set)
    return "\n".join(lines) + "\n"


def _lines(tree: Tree, path: KeyPath, only_set: bool) -> list[str]:
    name, value, origin = f"{'  ' * (len(path) - 1)}{_scalar(path[-1])}:", tree.get(path), tree.origins[path]
    if isinstance(value, dict) and value:
        below = [line for key in value for line in _lines(tree, (*path, key), only_set)]
        return [name, *below] if below else []
    if only_set and origin.kind == "default":
        return []
    text = f"{name} {_scalar(tree.as_displayed(path))}"
    return [f"{text:<{_COLUMN}}  # {hide_secrets(str(origin))}"]


def _scalar(value: object) -> str:
    """One key or value in flow style on one line. Most need no dumper, which takes 0.1 ms for each."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is int or (isinstance(value, str) and _PLAIN.fullmatch(value)) or value in ([], {}):
        return str(value)
    # The list around a value keeps the dumper from writing a document's end.
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def mask_secrets(tree: Tree, cls: type, path: KeyPath = ()) -> None:
    """Show a mask in place of each literal value of a section that the section's class says is secret."""
    for below, _ in marked((Secret,), cls, tree.get(path), path):
        written = tree.get(below) not in (None, "") and tree.origins[below].kind != "default"
        if written and below not in tree.shown:
            tree.shown[below] = MASK


def without_credentials(text: str) -> str:
    """Return the text with credentials of the addresses in it masked; references to variables stay."""

    def masked(match: re.Match[str]) -> str:
        user = match[0].partition("/")[2].lstrip("/")
        return match[0] if _REFERENCE.fullmatch(user) else f"{match['scheme']}://{MASK}@"

    def in_word(word: re.Match[str]) -> str:
        searched, at, rest = word[0].rpartition("@")  # behind it, each search would reach the end in vain
        return _SHOWN.sub(masked, searched + at) + rest

    return _WORD.sub(in_word, text) if ":/" in text else text


def hide_credentials(tree: Tree) -> Iterator[ConfigProblem]:
    """Mask the addresses that hold credentials, and yield a problem for each.

    An address that comes from a variable may hold them, since its reference is written; not so those of checkpoints,
    which are printed. A mask in place of a value is a problem, too.
    """
    for path, value in walk(tree.data):
        if not isinstance(value, str):
            continue
        if value == MASK:
            yield SecretNotKept(**tree.origins[path].at(dotted(path)))
        match = _CREDENTIALS.match(value) if "://" in value else None
        if match is None or (path in tree.shown and path[0] != "checkpoint"):
            continue
        masked = without_credentials(value)
        yield CredentialsInAddress(**tree.origins[path].at(dotted(path)), found=masked, scheme=match["scheme"].lower())
        tree.shown.setdefault(path, masked)


def learn_secrets(tree: Tree, path: KeyPath = (), *, references: bool = False) -> None:
    """Hide the masked values of a tree, at a path and below it, in all messages; with ``references`` also those that
    come from the environment, which may be defaults."""
    for below, shown in tree.shown.items():
        if below[: len(path)] == path and (references or MASK in shown):
            if isinstance(value := tree.get(below), (str, int, float) if shown == MASK else str):
                _learn(str(value), shown)
            learn_variables(_VARIABLE.findall(shown))


def learn_variables(names: Iterable[str]) -> bool:
    """Hide the values of variables of the environment, too; return whether one of them is set."""
    values = {name: value for name in names if (value := os.environ.get(name))}
    for name, value in values.items():
        _learn(value, f"${{oc.env:{name}}}")
    return bool(values)


def _learn(value: str, shown: str) -> None:
    # As messages spell it: as it is, quoted by Python or JSON, or as a path.
    for form in {value, repr(value)[1:-1], json.dumps(value)[1:-1], os.path.normpath(value)}:
        if len(form) >= _SHORTEST and _HIDDEN.get(form, MASK) == MASK:  # a reference says more
            _HIDDEN[form] = shown


def hide_secrets(text: str) -> str:
    """Return a text that is about to be printed or written without the secrets of the configurations that this process
    has resolved."""
    for value, shown in sorted(_HIDDEN.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(value, shown)
    return without_credentials(text)


def hide_secrets_in(error: BaseException) -> None:
    """Hide secrets in what an error carries, and in the errors that led to it: other libraries quote what they get."""

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return hide_secrets(value)
        texts = type(value) in (tuple, list) and all(isinstance(item, str) for item in value)
        return type(value)(map(hide_secrets, value)) if texts else value

    pending, seen = [error], set[int]()
    while pending:
        raised = pending.pop()
        if id(raised) in seen:
            continue
        seen.add(id(raised))
        raised.args = tuple(map(hidden, raised.args))
        for name, value in [*vars(raised).items(), ("filename", getattr(raised, "filename", None))]:
            if isinstance(value, BaseException):
                pending.append(value)
            elif name != "key" and hidden(value) != value:
                setattr(raised, name, hidden(value))
        pending += [linked for linked in (raised.__cause__, raised.__context__) if linked is not None]


def notes_on_secrets(tree: Tree) -> Iterator[str]:
    """Yield a line for each secret that was written literally."""
    for path, _ in walk(tree.data) if MASK in tree.shown.values() else ():
        if tree.shown.get(path) == MASK:
            yield (
                f"{dotted(path)}: the secret is masked in what the run writes, so it must be given again to resume."
                " Write ${oc.env:NAME}, with the secret in that variable"
            )


def shown_words(config: ResolvedConfig, words: Iterable[str]) -> list[str]:
    """Return the words with secrets masked; a reference such as ``${oc.env:NAME}`` stays as it was typed.

    The value of an override that a later one replaces is masked, since the configuration cannot say whether it is
    secret.
    """
    words, shown = list(words), list[str]()
    effective = drop_replaced(words)
    for word in words:
        key, equals, _ = word.partition("=")
        below = tuple(key.split("."))
        secret = equals and any(text == MASK and at[: len(below)] == below for at, text in config.tree.shown.items())
        shown.append(f"{key}={MASK}" if secret or word not in effective else hide_secrets(word))
    return shown


def drop_replaced(words: Sequence[str]) -> list[str]:
    """Return the overrides without those that a later one of the same key replaces; mappings are merged, so they stay.

    What has no effect may hold a secret that the configuration no longer knows.
    """
    effective: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not word.startswith("-") and not value.lstrip().startswith("{"):
            effective = [earlier for earlier in effective if earlier.partition("=")[0] != key]
        effective.append(word)
    return effective
