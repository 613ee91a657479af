"""From a tree to a section: defaults, one validation by pydantic, and a problem for each of its errors.

Values are read in pydantic's strict JSON mode, which has YAML's types: a list gives a tuple and a text a path, but no
text gives a number. Paths are made absolute: in a file they start at that file's directory, elsewhere at the working
directory. ``package://`` stays as it is in the tree, so that a saved configuration loads on other machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from nxdt_core.config.annotations import DefaultsTo, StartsAtFile
from nxdt_core.config.interpolation import UNRESOLVED, has_interpolation
from nxdt_core.config.secrets import mask_secrets
from nxdt_core.config.section import REQUIRED, Key, keys_of, members, nearest_keys
from nxdt_core.config.sources import PACKAGE_SCHEME, PackageNotFound, resolve_path
from nxdt_core.config.tree import (
    DEFAULT,
    LARGEST_INTEGER,
    MASK,
    KeyPath,
    Origin,
    Tree,
    describe_value,
    dotted,
    join,
    plain,
    walk,
)
from nxdt_core.errors.configuration import ComponentFinding, ConfigProblem, MissingKey, UnknownKey, WrongValue
from nxdt_core.protocols.batch import LARGEST

__all__ = ["Keys", "fill", "read", "read_part"]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a tree may have."""

    leaves: dict[KeyPath, Key] = field(default_factory=dict)
    followers: dict[str, str] = field(default_factory=dict)
    """Key → key that it takes its value from: a wrong value is reported at the latter."""
    names: dict[KeyPath, str] = field(default_factory=dict)
    """Dotted path of every key and section, in the order of the schema."""

    @property
    def known(self) -> tuple[str, ...]:
        """Return the paths that a wrong one may be meant to be."""
        return tuple(self.names.values())


def fill(tree: Tree, cls: type) -> Keys:
    """Give each key that was left out the default that ``cls`` declares, and return all keys."""
    keys = Keys()
    _fill(tree, cls, (), keys)
    for at, key in keys.leaves.items():
        link = key.mark(DefaultsTo)
        if link is None or tree.get(at) is not None or link.key not in tree:
            continue
        value, origin = tree.get(link.key), tree.origin(link.key)
        value = f"${{{link.key}}}" if has_interpolation(value) else value
        place = origin.at(link.key)["place"]
        follows = replace(DEFAULT, where=link.key, line=origin.line, written=place, directory=origin.directory)
        tree.set(at, value, follows, tree.shown_at(link.key))
        keys.followers[keys.names[at]] = link.key
    return keys


def _fill(tree: Tree, cls: type, path: KeyPath, keys: Keys) -> None:
    tree.shown.pop(path, None)  # a section is shown key by key
    given = tree.get(path)
    core = getattr(cls, "composed_of", (cls,))[-1]
    ordered: dict[str, Any] = {}
    section = keys.names.get(path, "")
    for name, key in keys_of(cls).items():
        at = (*path, name)
        keys.names[at] = join(section, name)
        value = given.get(name)
        if key.section is not None and (isinstance(value, dict) or (value is None and not key.optional)):
            if value is None:
                tree.set(at, {}, tree.origins[at] if name in given else DEFAULT)
            _fill(tree, key.section, at, keys)
        else:
            keys.leaves[at] = key
            if value is None and not key.optional and (key.default is not REQUIRED or key.marks):
                given.pop(name, None)  # null leaves such a key unset
            if name not in given and key.default is not REQUIRED and key.mark(DefaultsTo) is None:
                own = key.owner is not core and key.section is None
                tree.set(at, key.default, replace(DEFAULT, where=key.owner.__name__) if own else DEFAULT)
        if name in given:
            ordered[name] = given[name]
    unknown = {name: value for name, value in given.items() if name not in ordered}
    given.clear()
    given |= ordered | unknown


def _located(text: str, shown: str | None, origin: Origin) -> tuple[str, str | None]:
    """Return a path, and what is shown in its place, from where the file that sets it is."""
    if not text or text.startswith("/") or "://" in text:
        return text, shown
    if shown not in (None, MASK) and not text.startswith("~"):
        shown = f"{resolve_path('.', origin.directory)}/{shown}"
    return str(resolve_path(text, origin.directory)), shown


_NAME_BYTES = 255
"""Longest name within a path that Linux accepts."""


def _usable(text: str) -> str:
    """Return a path with ``package://`` made real.

    Raises:
        ValueError: the package is not installed, or the operating system does not accept the path: it raises an error
            even at the question whether others exist. The text describes the value.
    """
    names = text.encode(errors="replace").split(b"/")
    if not text or "\0" in text or any(len(name) > _NAME_BYTES for name in names):
        raise ValueError(describe_value(text))
    try:
        return str(resolve_path(text)) if text.startswith(PACKAGE_SCHEME) else text
    except PackageNotFound as error:
        raise ValueError(f"{text!r}, but {error}") from None


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of reading a section."""

    instance: Any
    """The section; None where one of its keys is wrong."""
    problems: list[ConfigProblem]
    wrong: Collection[KeyPath]
    """Keys whose value is wrong or missing."""
    data: dict[str, Any]
    """Plain data that were read, with real paths in place of ``package://``."""
    values: dict[str, Any]
    """Plain value by key path, lists as tuples; wrong ones are absent."""


def read(
    tree: Tree,
    cls: type,
    keys: Keys,
    prefix: str = "",
    *,
    open_sections: Collection[str] = (),
    unfilled: Mapping[str, type] | None = None,
) -> Reading:
    """Read a section from a tree that was filled and interpolated; its paths become absolute, its secrets masked.

    Args:
        tree: The values.
        cls: The section.
        keys: Those that filling the tree by ``cls`` gave.
        prefix: Path of the section, for messages.
        open_sections: Sections whose keys are not known, since their component is not.
        unfilled: Section → class of the keys in it that are reported elsewhere where they are missing.
    """
    problems: dict[KeyPath, ConfigProblem | None] = {}
    values = Tree(plain(tree.data), {})
    located: dict[KeyPath, tuple[str, str | None]] = {}
    for at, key in keys.leaves.items():
        mask_secrets(tree, key, at)
        for below in key.marked(StartsAtFile, tree.get(at), at) if StartsAtFile in key.marks_inside else ():
            if isinstance(text := tree.get(below), str):
                located[below] = absolute, _ = _located(text, tree.shown.get(below), tree.origins[below])
                try:
                    values.get(below[:-1])[below[-1]] = _usable(absolute)
                except ValueError as error:
                    problems.setdefault(at, _wrong_value(tree, at, key, prefix, str(error)))
    for path, value in walk(tree.data):
        unusable = ""
        if type(value) is int and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            unusable = "an integer of more than 64 bits"
        elif type(value) is float and LARGEST < abs(value) < math.inf:
            unusable = "a number beyond ±1e30"
        elif isinstance(value, str) and not value.isascii() and value.encode(errors="ignore").decode() != value:
            unusable = "text with half a character"
            values.get(path[:-1])[path[-1]] = ""  # JSON has no form of it
        if unusable or value is UNRESOLVED:
            around = (path[:depth] for depth in range(len(path) + 1))
            at = next((each for each in around if each in keys.leaves), ())
            if at and value is UNRESOLVED:  # reported where it could not be resolved
                problems[at] = None
            elif at and keys.leaves[at].section is None:  # not below an unknown key, nor in place of a section
                problems.setdefault(at, _wrong_value(tree, at, keys.leaves[at], prefix, unusable))
    instance = None
    try:
        instance = cls.model_validate_json(json.dumps(values.data, default=str), strict=True)  # type: ignore[attr-defined]
    except ValidationError as error:
        faults: dict[KeyPath, list[_Fault]] = {}
        for details in error.errors(include_url=False):
            fault = _fault_of(details, tree, cls)
            faults.setdefault(fault.at, []).append(fault)
        for at, group in faults.items():
            if at not in problems:
                problems[at] = _problem_of(group, tree, keys, prefix, open_sections, unfilled or {})
            if at and at not in keys.names:
                values.remove(at)  # so that a component's section can be read without the unknown key
    for below, (text, shown) in located.items():
        tree.set(below, text, tree.origins[below], shown)
    wrong = {at for at in problems if at in keys.names or not at}
    flat = {keys.names[at]: values.get(at) for at in keys.leaves if at in tree and at not in wrong}
    return Reading(
        None if problems else instance,
        _in_order(problems, keys) if problems else [],
        wrong,
        values.data,
        {name: tuple(value) if isinstance(value, list) else value for name, value in flat.items()},
    )


def _in_order(problems: Mapping[KeyPath, ConfigProblem | None], keys: Keys) -> list[ConfigProblem]:
    """Return the problems in the order of the schema; an unknown key comes after those of its section."""
    order = {at: number for number, at in enumerate(keys.names)}
    last = {at[:depth]: order[at] for at in keys.leaves for depth in range(len(at))}
    found = [(order.get(at, last.get(at[:-1], 0)), problem) for at, problem in problems.items() if problem]
    return [problem for _, problem in sorted(found, key=lambda each: each[0])]


def read_part(cls: type, part: Tree | Mapping[str, Any], path: str = "") -> tuple[Any, list[ConfigProblem]]:
    """Return an instance of ``cls`` from a section outside the schema, or None, and what is wrong with it.

    Args:
        cls: The section.
        part: Its values.
        path: Path of the section, for messages.
    """
    tree = part.copy() if isinstance(part, Tree) else Tree.of(part, DEFAULT)
    reading = read(tree, cls, fill(tree, cls), path)
    return reading.instance, reading.problems


@dataclass(frozen=True, slots=True)
class _Fault:
    """One thing that pydantic finds wrong with a key."""

    at: KeyPath
    """Path of the key."""
    section: type
    """Section that the key is in."""
    type: str
    """Error type of pydantic."""
    found: str
    """Description of the value that is wrong: the key's, or one inside it."""
    depth: int
    """Lists and mappings around that value: pydantic reports each member of a union, and the innermost counts."""
    raised: str
    """Message of a validator; empty where none raised."""


def _fault_of(details: Any, tree: Tree, cls: type) -> _Fault:
    inner: type | None = cls
    section: type = cls
    at: KeyPath = ()
    rest, kind = list(details["loc"]), details["type"]
    while inner is not None and rest:
        section, at = inner, (*at, str(rest.pop(0)))
        key = keys_of(section).get(str(at[-1]))
        inner = key.section if key is not None and isinstance(tree.get(at), dict) else None
    value = tree.get(at)
    found, depth = describe_value(value), int(bool(rest) and kind == "missing")
    if isinstance(value, list) and kind in ("missing", "too_long", "too_short"):
        found, depth, rest = f"a list of {len(value)}", 1, []
    for part in rest:  # members of a union are passed over
        if isinstance(value, list) and isinstance(part, int):
            value, depth = value[part], depth + 1
            found = f"{describe_value(value)} as item {part + 1} of the list"
        elif isinstance(value, dict) and part in value:
            value, depth = value[part], depth + 1
            found = f"{describe_value(value)} under {part!r}"
    return _Fault(at, section, kind, found, depth, str(details.get("ctx", {}).get("error", "")))


def _problem_of(
    faults: Sequence[_Fault],
    tree: Tree,
    keys: Keys,
    prefix: str,
    open_sections: Collection[str],
    unfilled: Mapping[str, type],
) -> ConfigProblem | None:
    """Return the problem behind what pydantic finds wrong with one key; None where it is reported elsewhere."""
    fault = max(faults, key=lambda each: each.depth)
    at, section = fault.at, dotted(fault.at[:-1])
    where, key = join(prefix, dotted(at)) if at else prefix, keys.leaves.get(at)
    if fault.type == "extra_forbidden" and not fault.depth:
        if section in open_sections:
            return None
        near = nearest_keys(where, [join(prefix, name) for name in keys.known])
        return UnknownKey(**tree.origin(at).at(where), candidates=near, known=tuple(keys_of(fault.section)))
    if fault.type == "missing" and not fault.depth:
        key = keys_of(fault.section)[str(at[-1])]
        if key.mark(DefaultsTo) is not None or unfilled.get(section) is key.owner:
            return None
        around = [tree.origin(at[:depth]) for depth in range(len(at) - 1, -1, -1)]
        written = (origin for origin in around if origin.kind != "default")  # of the innermost section first
        return MissingKey(**next(written, around[-1]).at(where), allowed=key.describe())
    if key is None:
        return ComponentFinding(**tree.origin(at).at(where), message=f"{fault.raised}.")
    found = tree.describe(at) if tree.hides(at) else fault.found
    hint = _hint(tree, at, key, {each.type for each in faults}, where)
    reason = f"{fault.raised[0].upper()}{fault.raised[1:]}." if fault.raised else ""
    return _wrong_value(tree, at, key, prefix, found, hint or reason)


def _wrong_value(tree: Tree, at: KeyPath, key: Key, prefix: str, found: str, hint: str = "") -> ConfigProblem:
    place = tree.origin(at).at(join(prefix, dotted(at)))
    allowed = "a mapping" if key.section is not None else key.describe()
    return WrongValue(**place, found=found, allowed=allowed, hint=hint)


_SHARES = {
    "trainer.val_check_interval": "A number with a decimal point is a share of a pass in Lightning; here"
    " trainer.check_val_every_n_epoch: 1 validates after each pass."
}
"""Keys whose floats mean something else in Lightning than the same number as an integer → what to write."""
_NUMBERS = {"int_type", "int_from_float", "float_type", "bool_type", "finite_number"}


def _hint(tree: Tree, at: KeyPath, key: Key, types: set[str], where: str) -> str:
    """Return what to write instead, where the value and pydantic's error types make clear what was meant."""
    value, origin = tree.get(at), tree.origin(at)
    shown = tree.shown_at(at)
    if shown is not None:
        of_variable = isinstance(value, str) and types & _NUMBERS and shown.startswith("${oc.env:")
        return f"The value of a variable is text: write ${{oc.decode:{shown}}}." if of_variable else ""
    if isinstance(value, float) and where in _SHARES:
        return _SHARES[where]
    if isinstance(value, dict):
        joined = next((name for name, each in value.items() if each is None and ":" in name), "")
        return f"Write a space after the colon: {{{joined.replace(':', ': ', 1)}}}." if joined else ""
    if types & _NUMBERS and isinstance(value, (str, float)):
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is not None and not math.isfinite(number) and types & (_NUMBERS - {"bool_type"}):
            return "It must be finite."
        if isinstance(value, str):
            return "Write it without quotes." if number is not None or value.lower() in ("true", "false") else ""
        if types & {"int_type", "int_from_float"} and value.is_integer():
            return f"Write {int(value)}."
    takes_text = "string_type" in types and StartsAtFile not in key.marks_inside
    takes_numbers = types & {"int_type", "float_type", "greater_than_equal", "less_than_equal"}
    if takes_text and not takes_numbers and type(value) in (int, float):
        text = f"'{origin.text or value}'"  # a shell removes the outer quotes
        return f'Write it in quotes: {where}="{text}".' if origin.kind == "override" else f"Write it in quotes: {text}."
    if isinstance(value, str) and types & {"tuple_type", "list_type", "iterable_type"}:
        return f"Write a list: [{value}]."
    choices = [choice for each in members(key.annotation) if get_origin(each) is Literal for choice in get_args(each)]
    close = get_close_matches(str(value), [each for each in choices if isinstance(each, str)], n=1)
    return f"Did you mean {close[0]!r}?" if close and isinstance(value, str) else ""
