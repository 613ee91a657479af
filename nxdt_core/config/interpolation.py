"""``${…}`` by OmegaConf, value by value, so that each failure is a separate problem.

OmegaConf is imported only where an interpolation is more than the path of a key with a plain value: it costs 45 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate
from typing import Any

from nxdt_core.config.secrets import hide_secrets
from nxdt_core.config.section import nearest_keys
from nxdt_core.config.tree import MASK, KeyPath, Origin, Tree, dotted, walk
from nxdt_core.errors.configuration import BadInterpolation, ConfigProblem

__all__ = ["MANDATORY", "UNRESOLVED", "has_interpolation", "interpolate", "interpolations"]

_READ: ContextVar[list[str]] = ContextVar("variables of the environment that OmegaConf has read")
_REFERENCE = re.compile(r"\$\{(\w[\w.\[\]]*)\}")
"""An interpolation that is nothing but the absolute path of a key."""

UNRESOLVED: Any = object()
"""Value in place of an interpolation that failed: already reported and never read."""
MANDATORY = "???"
"""OmegaConf's mark for "must be given": by an override, a plugin or ``config.json``, but not by a default."""

_MOST_LEVELS = 50
"""Levels of brackets in an interpolation. The parser and the resolvers recurse: beyond a few hundred, whether they
still succeed depends on how deep the stack is already."""
_MISSING = re.compile(r"Interpolation key '([^']*)' not found")
_RAISED = re.compile(r"^\w+ raised while resolving interpolation: ")


def has_interpolation(value: object) -> bool:
    """Return whether a scalar holds ``${…}``."""
    return isinstance(value, str) and "${" in value


def interpolations(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path and text of every scalar of plain data that holds ``${…}``."""
    for path, value in walk(data):
        if has_interpolation(value):
            yield path, value


def interpolate(tree: Tree, known: Sequence[str] = (), *, wanted: Sequence[str] = ("",)) -> list[ConfigProblem]:
    """Replace interpolations in the tree, and return the problems of those that cannot be replaced.

    Args:
        tree: Has every key that an interpolation may name.
        known: Key paths for suggestions.
        wanted: Key paths whose values are needed, with all below them; others may keep their interpolations. (A
            tree costs OmegaConf 15 ms, so it is made only where it is needed.)
    """
    pending: dict[KeyPath, str] = {}
    for path, text in list(interpolations(tree.data)):
        if not _touches(dotted(path), wanted):
            continue
        target = reference[1] if (reference := _REFERENCE.fullmatch(text)) else None
        value = UNRESOLVED if target is None else tree.get(target, UNRESOLVED)
        written = value is None or (isinstance(value, (bool, int, float, str)) and not has_interpolation(value))
        if written and value != MANDATORY and tree.shown_at(str(target)) is None:
            tree.set(path, value, _from_there(tree, path, text))
        else:
            pending[path] = text
    return _by_omegaconf(tree, pending, known) if pending else []


def _by_omegaconf(tree: Tree, pending: dict[KeyPath, str], known: Sequence[str]) -> list[ConfigProblem]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("multiply"):  # a program that uses NeMo has it already
        OmegaConf.register_resolver("multiply", _multiply)
    OmegaConf.register_resolver("oc.env", _read, replace=True, annotation_validation="off")
    readable = tree.copy()
    for path, value in list(walk(tree.data)):
        if not isinstance(value, (dict, list)):
            shown = tree.shown.get(path, MASK)  # the reference again, so that who refers to it is known to read it
            held = isinstance(value, (bool, int, float, str))  # not an object in a mapping that a program passes
            readable.set(path, shown if shown != MASK else value if held else None, tree.origins[path])
    malformed = {path: fault for path, text in interpolations(readable.data) if (fault := _fault(text))}
    for path in malformed:
        readable.set(path, None, tree.origins[path])
    config = OmegaConf.create(readable.data)
    problems: list[ConfigProblem] = []
    for path, text in pending.items():
        origin, variables = tree.origins[path], list[str]()
        if path in malformed:
            advice = "Write ${key.path}, ${.neighbour} or ${multiply:a,b}."
            place = origin.at(dotted(path))
            problems.append(BadInterpolation(**place, text=text, reason=malformed[path], advice=advice))
            tree.set(path, UNRESOLVED, origin)
            continue
        _READ.set(variables)
        try:
            value = OmegaConf.select(config, "".join(f"[{part}]" for part in path), throw_on_resolution_failure=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            hide_secrets.learn_variables(variables)  # the reason may quote what was read
            problems.append(_unresolved(path, text, tree, error, known))
            tree.set(path, UNRESOLVED, origin)
            continue
        tree.set(path, value, _from_there(tree, path, text))
        if variables:
            _show_reference(tree, path, text)
        if hide_secrets.learn_variables(variables):
            hide_secrets.learn(tree, path)
    return problems


def _read(*arguments: Any) -> Any:
    """Return what OmegaConf's ``oc.env`` does, and note the variable, however deep it is in an interpolation."""
    from omegaconf.resolvers import oc

    if (names := _READ.get(None)) is not None:
        names.append(str(arguments[0]))
    return oc.env(*arguments)


def _show_reference(tree: Tree, path: KeyPath, text: str) -> None:
    """Show ``text`` in place of the value at ``path``, which was read from the environment.

    Values below a mapping or list are shown as a reference to the same place, where ``text`` is the path of a key.
    """
    target = _REFERENCE.fullmatch(text)
    for below, _ in walk(tree.get(path), path):
        steps = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in below[len(path) :])
        named = target and re.fullmatch(r"[.\[\]\w]*", steps)
        tree.shown[below] = text if not steps else f"${{{target[1]}{steps}}}" if target and named else MASK


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


def _multiply(left: Any, right: Any) -> Any:
    """``${multiply:a,b}``, the resolver that NeMo's configurations use."""
    if not all(isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError(f"multiply needs two numbers, not {left!r} and {right!r}")
    return left * right


def _from_there(tree: Tree, path: KeyPath, text: str) -> Origin:
    """Return the origin of an interpolation at ``path``. A relative path that begins with the value of another key
    starts where that key was set."""
    directory = tree.origins[path].directory
    while (target := _REFERENCE.match(text)) and target[1] in tree:
        directory, text = tree.origin(target[1]).directory, str(tree.get(target[1]))
    return replace(tree.origins[path], directory=directory)


def _touches(path: str, wanted: Sequence[str]) -> bool:
    """Return whether the value at ``path`` is, contains, or is inside one that is wanted."""
    return any(not key or path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.") for key in wanted)


def _unresolved(path: KeyPath, text: str, tree: Tree, error: Exception, known: Sequence[str]) -> ConfigProblem:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    missing = _MISSING.search(lines[0])
    reason = _RAISED.sub("", lines[0]).strip("\"'.")
    advice = ""
    if missing:
        reason, advice = f"there is no key '{missing[1]}'", "Name an existing key by its whole path."
    elif _RAISED.match(lines[0]) and "maximum recursion depth" in lines[0]:
        reason, advice = "the text that it decodes is nested too deep", "Write fewer levels."
    elif lines[0].startswith("GrammarParseError raised"):  # its text quotes parts of what was read
        reason, advice = "the text that it decodes is malformed", "Correct the text, or leave out ${oc.decode:…}."
    elif isinstance(error, RecursionError) or "Recursive" in lines[0]:
        reason, advice = "it refers to itself", "Give one of the keys a value."
    elif "oc.env" in text:
        advice = "Set the variable, or give a default: ${oc.env:NAME,default}."
    return BadInterpolation(
        **tree.origins[path].at(dotted(path)),
        text=text,
        reason=reason,
        advice=advice,
        candidates=nearest_keys(missing[1].lstrip("."), known) if missing else (),
    )
