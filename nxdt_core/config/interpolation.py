"""``${…}`` by OmegaConf, value by value, so that each failure is a separate problem.

OmegaConf is imported only where an interpolation is more than the path of a key with a plain value: it costs 45 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from nxdt_core.config.secrets import hide_secrets
from nxdt_core.config.section import nearest_keys
from nxdt_core.config.tree import MASK, KeyPath, Node, dotted, from_plain, replaced, walk
from nxdt_core.errors.configuration import BadInterpolation, ConfigProblem

__all__ = [
    "MANDATORY",
    "UNRESOLVED",
    "from_environment",
    "has_interpolation",
    "interpolate",
    "interpolations",
    "recording",
]

_READ: ContextVar[list[str] | None] = ContextVar("variables that were read", default=None)
_REFERENCE = re.compile(r"\$\{(\w[\w.\[\]]*)\}")
"""An interpolation that is nothing but the absolute path of a key."""


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note the names of variables that OmegaConf reads during the block, however deep in an interpolation."""
    # Here, not above: OmegaConf is needed by few configurations.
    from omegaconf import OmegaConf

    OmegaConf.register_resolver("oc.env", _read, replace=True, annotation_validation="off")
    names: list[str] = []
    token = _READ.set(names)
    try:
        yield names
    finally:
        _READ.reset(token)


def _read(*arguments: Any) -> Any:
    from omegaconf.resolvers import oc

    names = _READ.get()
    if names is not None:
        names.append(str(arguments[0]))
    return oc.env(*arguments)


def from_environment(node: Node, text: str) -> Node:
    """Return the node of what ``text`` was resolved to, shown as ``text``.

    Values below a mapping or list are shown as a reference to the same place, where ``text`` is the path of a key;
    the sections that are taken apart later show that.
    """
    value, target = node.value, _REFERENCE.fullmatch(text)

    def below(step: str) -> str:
        return f"${{{target[1]}{step}}}" if target and re.fullmatch(r"[.\[\]\w]+", step) else MASK

    if isinstance(value, dict):
        value = {key: from_environment(child, below(f".{key}")) for key, child in value.items()}
    elif isinstance(value, list):
        value = [from_environment(child, below(f"[{number}]")) for number, child in enumerate(value)]
    return Node(value, node.origin, text)


UNRESOLVED: Any = object()
"""Value of a node whose interpolation failed: already reported and never read."""

_MOST_LEVELS = 50
"""Of brackets in one interpolation. The parser and the resolvers recurse: beyond a few hundred, whether they still
succeed depends on how deep the stack is already."""
MANDATORY = "???"
"""OmegaConf's mark for "must be given": by an override, a plugin or ``config.json``, but not by a default."""
_MISSING = re.compile(r"Interpolation key '([^']*)' not found")
_RAISED = re.compile(r"^\w+ raised while resolving interpolation: ")


def has_interpolation(value: object) -> bool:
    """Return whether a scalar holds ``${…}``."""
    return isinstance(value, str) and "${" in value


def interpolate(
    tree: Node, known: Sequence[str] = (), *, wanted: Sequence[str] = ("",)
) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree with interpolations replaced, and the problems of those that cannot be.

    Args:
        tree: Has every key that an interpolation may name.
        known: Key paths for suggestions.
        wanted: Key paths whose values are needed, with all below them; others may keep their interpolations. (A
            tree costs OmegaConf 15 ms, so it is made only where it is needed.)
    """
    pending: list[tuple[KeyPath, Node]] = []
    for path, node in [each for each in interpolations(tree) if _touches(dotted(each[0]), wanted)]:
        named = _plain_target(tree, str(node.value))
        if named is None:
            pending.append((path, node))
        else:
            origin = replace(node.origin, directory=_directory(tree, node))
            tree = replaced(tree, path, Node(named.value, origin))
    if not pending:
        return tree, []
    # Here, not above: OmegaConf is needed by few configurations.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("multiply"):  # a program that uses NeMo has it already
        OmegaConf.register_resolver("multiply", _multiply)
    written = list(interpolations(tree))
    malformed = {path: fault for path, node in written if (fault := _fault(str(node.value)))}
    readable = tree
    for path, node in written:
        if path in malformed:
            readable = replaced(readable, path, Node(None, node.origin))
    config = OmegaConf.create(_written(readable))
    problems: list[ConfigProblem] = []
    variables: list[str] = []
    for path, node in pending:
        try:
            if path in malformed:
                raise MalformedInterpolation(malformed[path])
            with recording() as variables:
                place = "".join(f"[{part}]" for part in path)
                value = OmegaConf.select(config, place, throw_on_resolution_failure=True)
                found = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            resolved = from_plain(found, replace(node.origin, directory=_directory(tree, node)))
            if variables:
                resolved = from_environment(resolved, str(node.value))
            if hide_secrets.learn_variables(variables):
                hide_secrets.learn(resolved)
        except (OmegaConfBaseException, RecursionError, MalformedInterpolation) as error:
            hide_secrets.learn_variables(variables)  # the reason may quote what was read
            problems.append(_unresolved(path, node, error, known))
            resolved = Node(UNRESOLVED, node.origin)
        tree = replaced(tree, path, resolved)
    return tree, problems


def _plain_target(tree: Node, text: str) -> Node | None:
    """Return the node of the key that is all that ``text`` names, where it needs no OmegaConf: a value as written."""
    reference = _REFERENCE.fullmatch(text)
    node = tree.find(reference[1]) if reference else None
    if node is None or node.shown is not None or has_interpolation(node.value) or node.value == MANDATORY:
        return None
    return node if node.value is None or isinstance(node.value, (bool, int, float, str)) else None


class MalformedInterpolation(Exception):
    """Return the problem of a text that is not an interpolation by OmegaConf's grammar; in a tree, it would make the
    whole tree invalid."""


def _fault(text: str) -> str:
    """Return what keeps OmegaConf from parsing the text; empty where it can."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    # Text in quotes is counted like any other.
    changes = (1 if letter in "{[(" else -1 if letter in "}])" else 0 for letter in text)
    if max(accumulate(changes), default=0) > _MOST_LEVELS:
        return f"it is nested too deep (at most {_MOST_LEVELS} levels)"
    try:
        OmegaConf.create({"value": text})
    except GrammarParseError:
        return "it is malformed"
    return ""


def _written(node: Node) -> Any:
    """The plain tree with ``None`` for what OmegaConf cannot hold: objects in a mapping that a program passes.

    What came from the environment is its reference again, so that who refers to it is known to read the environment.
    """
    if isinstance(node.value, dict):
        return {key: _written(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_written(child) for child in node.value]
    value = node.value if node.shown in (None, MASK) else node.shown
    return value if isinstance(value, (bool, int, float, str)) else None


def _multiply(left: Any, right: Any) -> Any:
    """``${multiply:a,b}``, the resolver that NeMo's configurations use."""
    if not all(isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError(f"multiply needs two numbers, not {left!r} and {right!r}")
    return left * right


def _directory(tree: Node, node: Node) -> Path | None:
    """Return where a relative path starts that may begin with the value of another key: where that key was set."""
    while target := _REFERENCE.match(str(node.value)):
        if (named := tree.find(target[1])) is None:
            break
        node = named
    return node.origin.directory


def interpolations(tree: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Yield the path and node of every scalar that holds ``${…}``."""
    for path, node in walk(tree):
        if has_interpolation(node.value):
            yield path, node


def _touches(path: str, wanted: Sequence[str]) -> bool:
    """Return whether the value at ``path`` is, contains, or is inside one that is wanted."""
    return any(not key or path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.") for key in wanted)


def _unresolved(path: KeyPath, node: Node, error: Exception, known: Sequence[str]) -> ConfigProblem:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    missing = _MISSING.search(lines[0])
    reason = _RAISED.sub("", lines[0]).strip("\"'.")
    advice = ""
    if isinstance(error, MalformedInterpolation):
        reason, advice = str(error), "Write ${key.path}, ${.neighbour} or ${multiply:a,b}."
    elif missing:
        reason, advice = f"there is no key '{missing[1]}'", "Name an existing key by its whole path."
    elif _RAISED.match(lines[0]) and "maximum recursion depth" in lines[0]:
        reason, advice = "the text that it decodes is nested too deep", "Write fewer levels."
    elif lines[0].startswith("GrammarParseError raised"):  # its text quotes parts of what was read
        reason, advice = "the text that it decodes is malformed", "Correct the text, or leave out ${oc.decode:…}."
    elif isinstance(error, RecursionError) or "Recursive" in lines[0]:
        reason, advice = "it refers to itself", "Give one of the keys a value."
    elif "oc.env" in str(node.value):
        advice = "Set the variable, or give a default: ${oc.env:NAME,default}."
    return BadInterpolation(
        **node.origin.at(dotted(path)),
        text=str(node.value),
        reason=reason,
        advice=advice,
        candidates=nearest_keys(missing[1].lstrip("."), known) if missing else (),
    )
