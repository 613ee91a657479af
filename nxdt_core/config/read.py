"""From a tree to a section: defaults, ``${…}``, one validation by pydantic, and a problem for each of its errors.

OmegaConf resolves each ``${…}`` alone, so that each failure is a separate problem. It is imported only where one is
more than the path of a key with a plain value: that costs 45 ms.

Values are read in pydantic's strict JSON mode, which has YAML's types: a list gives a tuple and a text a path, but no
text gives a number. Paths are made absolute: in a file they start at that file's directory, elsewhere at the working
directory. ``package://`` stays as it is in the tree, so that a saved configuration loads on other machines; a name of
the Hugging Face hub gets its commit there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from nxdt_core.config.hub import HUB_SCHEME, resolve
from nxdt_core.config.section import (
    REQUIRED,
    DefaultsTo,
    Key,
    NamesModel,
    StartsAtFile,
    keys_of,
    marked,
    members,
    nearest_keys,
)
from nxdt_core.config.show import learn_secrets, learn_variables, mask_secrets
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
    parts_of,
    plain,
    walk,
)
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    BadInterpolation,
    ComponentFinding,
    ConfigProblem,
    MissingKey,
    UnknownKey,
    WrongValue,
)
from nxdt_core.errors.hub import HubError
from nxdt_core.protocols.batch import LARGEST
from nxdt_core.system.paths import PACKAGE_SCHEME, PackageNotFound, resolve_path

_VARIABLES: ContextVar[list[str]] = ContextVar("variables of the environment that OmegaConf has read")
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
_NAME_BYTES = 255
"""Longest name within a path that Linux accepts."""
_SHARES = {
    "trainer.val_check_interval": "A number with a decimal point is a share of a pass in Lightning; here"
    " trainer.check_val_every_n_epoch: 1 validates after each pass."
}
"""Keys whose floats mean something else in Lightning than the same number as an integer → what to write."""
_NUMBERS = {"int_type", "int_from_float", "float_type", "bool_type", "finite_number"}


@dataclass(slots=True, kw_only=True)
class Keys:
    """The keys that a tree may have: those of the core's section and of the components that it selects."""

    classes: dict[str, type] = field(default_factory=dict)
    """Path of a section → class with the keys of the component that it selects. A key that the core's section declares
    too has the type and the default that the component gives it."""
    open: set[str] = field(default_factory=set)
    """Sections whose component is unknown, so that their keys are unknown too."""
    unfilled: type | None = None
    """Class of the model where its keys would have come from a file that cannot be read: that they are missing is
    reported at the file."""
    models: list[tuple[KeyPath, type]] = field(default_factory=list)
    """Path and class of each model that reads some of them: the components' first, so that their types count."""
    leaves: dict[KeyPath, Key] = field(default_factory=dict)
    names: dict[KeyPath, str] = field(default_factory=dict)
    """Dotted path of every key and section, in the order of the schema."""
    unknown: dict[KeyPath, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the tree that no model has → the names of those that are known in their section."""


def fill(tree: Tree, cls: type, keys: Keys | None = None) -> Keys:
    """Give each key of a section that was left out its default, and return all keys.

    Args:
        tree: The values.
        cls: The section.
        keys: What is known of the components that it selects.
    """
    keys = keys or Keys()
    _fill(tree, cls, (), keys)
    keys.models.append(((), cls))
    for at, key in keys.leaves.items():
        link = key.mark(DefaultsTo)
        if link is None or tree.get(at) is not None or link.key not in tree:
            continue
        value, origin = tree.get(link.key), tree.origin(link.key)
        value = f"${{{link.key}}}" if has_interpolation(value) else value
        place = origin.at(link.key)["place"]
        default_origin = replace(DEFAULT, where=link.key, line=origin.line, written=place, directory=origin.directory)
        tree.set(at, value, default_origin, tree.shown.get(parts_of(link.key)))
    return keys


def _fill(tree: Tree, cls: type, path: KeyPath, keys: Keys) -> None:
    tree.shown.pop(path, None)  # a section is shown key by key
    section_values = tree.get(path)
    section = keys.names.get(path, "")
    component_cls = keys.classes.get(section)
    declared = {**keys_of(cls), **(keys_of(component_cls) if component_cls is not None else {})}
    if component_cls is not None:
        keys.models.append((path, component_cls))
    ordered: dict[str, Any] = {}
    for name, key in declared.items():
        at = (*path, name)
        keys.names[at] = join(section, name)
        value = section_values.get(name)
        if key.section is not None and (isinstance(value, dict) or (value is None and not key.optional)):
            if value is None:
                tree.set(at, {}, tree.origins[at] if name in section_values else DEFAULT)
            _fill(tree, key.section, at, keys)
        else:
            keys.leaves[at] = key
            if value is None and not key.optional and (key.default is not REQUIRED or key.marks):
                section_values.pop(name, None)  # null leaves such a key unset
            if name not in section_values and key.default is not REQUIRED and key.mark(DefaultsTo) is None:
                of_component = key.owner is component_cls and key.section is None
                tree.set(
                    at,
                    key.default,
                    replace(DEFAULT, where=component_cls.__name__) if of_component and component_cls else DEFAULT,
                )
        if name in section_values:
            ordered[name] = section_values[name]
    unknown = {name: value for name, value in section_values.items() if name not in ordered}
    keys.unknown.update({(*path, name): tuple(declared) for name in unknown})
    section_values.clear()
    section_values |= ordered | unknown


def has_interpolation(value: object) -> bool:
    """Return whether a scalar holds ``${…}``."""
    return isinstance(value, str) and "${" in value


def interpolations(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path and text of every scalar of plain data that holds ``${…}``."""
    for path, value in walk(data):
        if has_interpolation(value):
            yield path, value


def interpolate(tree: Tree, known: Iterable[str] = (), *, wanted: Sequence[str] = ("",)) -> list[ConfigProblem]:
    """Replace interpolations in the tree, and return the problems of those that cannot be replaced.

    Args:
        tree: Has every key that an interpolation may name.
        known: Key paths for suggestions.
        wanted: Key paths whose values are needed, with all below them; others may keep their interpolations. (A
            tree costs OmegaConf 15 ms, so it is made only where it is needed.)
    """
    pending: dict[KeyPath, str] = {}
    for path, text in list(interpolations(tree.data)):
        at = dotted(path)
        if not any(not key or at == key or at.startswith(f"{key}.") or key.startswith(f"{at}.") for key in wanted):
            continue
        target = reference[1] if (reference := _REFERENCE.fullmatch(text)) else None
        value = UNRESOLVED if target is None else tree.get(target, UNRESOLVED)
        literal = value is None or (isinstance(value, (bool, int, float, str)) and not has_interpolation(value))
        if literal and value != MANDATORY and tree.shown_at(str(target)) is None:
            tree.set(path, value, _from_there(tree, path, text))
        else:
            pending[path] = text
    if not pending:
        return []

    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    if not OmegaConf.has_resolver("multiply"):  # a program that uses NeMo has it already
        OmegaConf.register_resolver("multiply", _multiply)
    OmegaConf.register_resolver("oc.env", _read_variable, replace=True, annotation_validation="off")
    readable = tree.copy()
    for path, value in list(walk(tree.data)):
        if not isinstance(value, (dict, list)):
            shown = tree.shown.get(path, MASK)  # the reference again, so that who refers to it is known to read it
            scalar = isinstance(value, (bool, int, float, str))  # not an object in a mapping that a program passes
            readable.set(path, shown if shown != MASK else value if scalar else None, tree.origins[path])
    malformed: dict[KeyPath, str] = {}
    for path, text in interpolations(readable.data):
        # Text in quotes is counted like any other.
        levels = (1 if letter in "{[(" else -1 if letter in "}])" else 0 for letter in text)
        try:
            if max(accumulate(levels), default=0) > _MOST_LEVELS:
                malformed[path] = f"it is nested too deep (at most {_MOST_LEVELS} levels)"
            else:
                OmegaConf.create({"value": text})
        except GrammarParseError:
            malformed[path] = "it is malformed"
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
        _VARIABLES.set(variables)
        try:
            value = OmegaConf.select(config, "".join(f"[{part}]" for part in path), throw_on_resolution_failure=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            learn_variables(variables)  # the reason may quote what was read
            problems.append(_unresolved(path, text, tree, error, known))
            tree.set(path, UNRESOLVED, origin)
            continue
        tree.set(path, value, _from_there(tree, path, text))
        target = reference[1] if (reference := _REFERENCE.fullmatch(text)) else None
        for below, _ in walk(value, path) if variables else ():
            # What is below a mapping or list is shown as a reference to the same place, where the text is a key's path.
            steps = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in below[len(path) :])
            named = target and re.fullmatch(r"[.\[\]\w]*", steps)
            tree.shown[below] = text if not steps else f"${{{target}{steps}}}" if named else MASK
        if learn_variables(variables):
            learn_secrets(tree, path, references=True)
    return problems


def _read_variable(*arguments: Any) -> Any:
    """Return what OmegaConf's ``oc.env`` does, and note the variable, however deep it is in an interpolation."""
    from omegaconf.resolvers import oc

    if (names := _VARIABLES.get(None)) is not None:
        names.append(str(arguments[0]))
    return oc.env(*arguments)


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


def _unresolved(path: KeyPath, text: str, tree: Tree, error: Exception, known: Iterable[str]) -> ConfigProblem:
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


def read(tree: Tree, keys: Keys, prefix: str = "") -> tuple[dict[str, Any], list[ConfigProblem], dict[str, Any]]:
    """Read a section from a tree that was filled and interpolated; its paths become absolute.

    Args:
        tree: The values.
        keys: Those that filling the tree gave.
        prefix: Path of the section, for messages.

    Returns:
        The instance of each model by the path of its section, which is empty for the core's; None where a key is wrong.
        The problems. And the plain value of each key by its path, lists as tuples; wrong ones are absent.
    """
    problems: dict[KeyPath, ConfigProblem | None] = {}
    values = Tree(plain(tree.data), {})
    located: dict[KeyPath, tuple[str, str | None]] = {}
    for at, key in keys.leaves.items():
        for below, mark in list(marked((StartsAtFile, NamesModel), key.annotation, tree.get(at), at)):
            if not isinstance(text := tree.get(below), str):
                continue
            if text.startswith(HUB_SCHEME):
                try:
                    name = resolve(text, as_data=below[0] == "data" and "tokenizer" not in below)
                    tree.set(below, str(name), tree.origins[below])
                    values.get(below[:-1])[below[-1]] = str(name.path)
                except HubError as error:
                    place = tree.origin(below).at(join(prefix, dotted(below)))
                    problems.setdefault(at, BadComponentChoice(**place, error=error))
                continue
            if mark is NamesModel:
                continue
            shown, directory, unusable = tree.shown.get(below), tree.origins[below].directory, ""
            if text and not text.startswith("/") and "://" not in text:
                if shown not in (None, MASK) and not text.startswith("~"):
                    shown = f"{resolve_path('.', directory)}/{shown}"
                text = str(resolve_path(text, directory))
            located[below] = text, shown
            names = text.encode(errors="replace").split(b"/")
            if not text or "\0" in text or any(len(name) > _NAME_BYTES for name in names):
                unusable = describe_value(text)  # the operating system raises an error even when asked if it exists
            try:
                values.get(below[:-1])[below[-1]] = str(resolve_path(text)) if text.startswith(PACKAGE_SCHEME) else text
            except PackageNotFound as error:
                unusable = unusable or f"{text!r}, but {error}"
            if unusable:
                problems.setdefault(at, _wrong_value(tree, at, key, prefix, unusable))
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
            at = next((above for above in around if above in keys.leaves), ())
            if at and value is UNRESOLVED:  # reported where it could not be resolved
                problems[at] = None
            elif at and keys.leaves[at].section is None:  # not below an unknown key, nor in place of a section
                problems.setdefault(at, _wrong_value(tree, at, keys.leaves[at], prefix, unusable))
    instances: dict[KeyPath, Any] = {}
    for path, cls in keys.models:
        try:
            data = json.dumps(_values_of(cls, values.get(path), path, keys), default=str)
            instances[path] = cls.model_validate_json(data, strict=True)  # type: ignore[attr-defined]
        except ValidationError as error:
            instances[path] = None
            for at, problem in _problems_of(error, tree, path, cls, keys, prefix):
                problems.setdefault(at, problem)
        if any(path == at[: len(path)] and at[len(path)] in keys_of(cls) for at in problems if len(at) > len(path)):
            instances[path] = None  # with another value in place of a wrong one, what the component says would mislead
    wrong = set(problems)
    for at, siblings in keys.unknown.items():
        if dotted(at[:-1]) not in keys.open:
            problems[at] = _unknown_key(tree, at, siblings, keys, prefix)
    for below, (text, shown) in located.items():
        tree.set(below, text, tree.origins[below], shown)
    # In the order of the schema; an unknown key comes after those of its section.
    order = {at: number for number, at in enumerate(keys.names)}
    last = {at[:depth]: order[at] for at in keys.leaves for depth in range(len(at)) if problems}
    ordered = sorted(problems, key=lambda at: order.get(at, last.get(at[:-1], 0)))
    flat = {keys.names[at]: values.get(at) for at in keys.leaves if at in tree and at not in wrong}
    if problems or keys.unknown:
        instances[()] = None
    return (
        {dotted(path): instance for path, instance in instances.items()},
        [problem for at in ordered if (problem := problems[at]) is not None],
        {name: tuple(value) if isinstance(value, list) else value for name, value in flat.items()},
    )


def _values_of(cls: type, values: Mapping[str, Any], path: KeyPath, keys: Keys) -> dict[str, Any]:
    """Return those of the values of a section that a model reads."""
    read_values = {}
    for name, key in keys_of(cls).items():
        if name in values:
            read_values[name] = value = values[name]
            if key.section is not None and isinstance(value, dict) and (*path, name) not in keys.leaves:
                read_values[name] = _values_of(key.section, value, (*path, name), keys)
    return read_values


def read_part(cls: type, part: Tree | Mapping[str, Any], path: str = "") -> tuple[Any, list[ConfigProblem]]:
    """Return an instance of ``cls`` from a section outside the schema, or None, and what is wrong with it.

    Args:
        cls: The section.
        part: Its values.
        path: Path of the section, for messages.
    """
    tree = part.copy() if isinstance(part, Tree) else Tree.of(part, DEFAULT)
    keys = fill(tree, cls)
    mask_secrets(tree, cls)
    instances, problems, _ = read(tree, keys, path)
    return instances[""], problems


def _problems_of(
    error: ValidationError, tree: Tree, path: KeyPath, cls: type, keys: Keys, prefix: str
) -> Iterator[tuple[KeyPath, ConfigProblem | None]]:
    """Yield each key that pydantic finds wrong in the model at ``path``, and the problem behind it; None where that is
    reported elsewhere."""
    types: dict[KeyPath, set[str]] = {}
    # Pydantic reports each member of a union. The error of the value inside most lists and mappings counts.
    innermost: dict[KeyPath, tuple[int, str, str, str, type]] = {}
    for details in error.errors(include_url=False):
        inner: type | None = cls
        section: type = cls
        at: KeyPath = path
        rest, kind = list(details["loc"]), details["type"]
        while inner is not None and rest:
            section, at = inner, (*at, str(rest.pop(0)))
            key = keys_of(section).get(str(at[-1]))
            inner = key.section if key is not None and isinstance(tree.get(at), dict) else None
        value = tree.get(at)
        described, depth = describe_value(value), int(bool(rest) and kind == "missing")
        if isinstance(value, list) and kind in ("missing", "too_long", "too_short"):
            described, depth, rest = f"a list of {len(value)}", 1, []
        for part in rest:  # members of a union are passed over
            if isinstance(value, list) and isinstance(part, int):
                value, depth = value[part], depth + 1
                described = f"{describe_value(value)} as item {part + 1} of the list"
            elif isinstance(value, dict) and part in value:
                value, depth = value[part], depth + 1
                described = f"{describe_value(value)} under {part!r}"
        types.setdefault(at, set()).add(kind)
        if at not in innermost or depth > innermost[at][0]:
            innermost[at] = depth, kind, described, str(details.get("ctx", {}).get("error", "")), section

    for at, (depth, kind, described, raised, section) in innermost.items():
        where, leaf = join(prefix, dotted(at)) if at else prefix, keys.leaves.get(at)
        if kind == "extra_forbidden" and not depth:  # in a section that is another one by reference
            yield at, _unknown_key(tree, at, keys_of(section), keys, prefix)
        elif kind == "missing" and not depth:
            key = keys_of(section)[str(at[-1])]
            if key.mark(DefaultsTo) is not None or (cls is keys.unfilled and at[:-1] == path):
                yield at, None
                continue
            above = [tree.origin(at[:depth]) for depth in range(len(at) - 1, -1, -1)]
            written = (origin for origin in above if origin.kind != "default")  # of the innermost section first
            yield at, MissingKey(**next(written, above[-1]).at(where), allowed=key.describe())
        elif leaf is None:
            yield at, ComponentFinding(**tree.origin(at).at(where), message=f"{raised}.")
        else:
            described = tree.describe(at) if tree.hides(at) else described
            reason = f"{raised[0].upper()}{raised[1:]}." if raised else ""
            yield at, _wrong_value(tree, at, leaf, prefix, described, _hint(tree, at, leaf, types[at], where) or reason)


def _unknown_key(tree: Tree, at: KeyPath, known: Iterable[str], keys: Keys, prefix: str) -> UnknownKey:
    where = join(prefix, dotted(at))
    near = nearest_keys(where, [join(prefix, name) for name in keys.names.values()])
    return UnknownKey(**tree.origin(at).at(where), candidates=near, known=tuple(known))


def _wrong_value(tree: Tree, at: KeyPath, key: Key, prefix: str, found: str, hint: str = "") -> ConfigProblem:
    place = tree.origin(at).at(join(prefix, dotted(at)))
    allowed = "a mapping" if key.section is not None else key.describe()
    return WrongValue(**place, found=found, allowed=allowed, hint=hint)


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
        joined = next((name for name, item in value.items() if item is None and ":" in name), "")
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
    takes_text = "string_type" in types and "a path" not in key.describe()
    takes_numbers = types & {"int_type", "float_type", "greater_than_equal", "less_than_equal"}
    if takes_text and not takes_numbers and type(value) in (int, float):
        text = f"'{origin.text or value}'"  # a shell removes the outer quotes
        return f'Write it in quotes: {where}="{text}".' if origin.kind == "override" else f"Write it in quotes: {text}."
    if isinstance(value, str) and types & {"tuple_type", "list_type", "iterable_type"}:
        return f"Write a list: [{value}]."
    choices = [
        choice for member in members(key.annotation) if get_origin(member) is Literal for choice in get_args(member)
    ]
    close = get_close_matches(str(value), [choice for choice in choices if isinstance(choice, str)], n=1)
    return f"Did you mean {close[0]!r}?" if close and isinstance(value, str) else ""
