"""A section of the configuration as a pydantic model: its base class, the annotations of its keys, and descriptions of
what they allow.

An annotation can name bounds, secrets, paths and lengths of time in addition to a type. They are written with
:data:`typing.Annotated`, so that type checkers see the bare type. Components' own sections may use them too::

    momentum: Annotated[float, Range(0.0, 1.0)] = 0.9
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr

from nxdt_core.config.tree import KeyPath, join, walk
from nxdt_core.errors.base import NxdtError, either

__all__ = [
    "FORMS",
    "LISTS",
    "REQUIRED",
    "TABLES",
    "DefaultsTo",
    "Duration",
    "Fraction",
    "Key",
    "NamesModel",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PartOf",
    "PositiveInt",
    "Range",
    "ScheduleSection",
    "Secret",
    "SecretText",
    "Section",
    "SourcePath",
    "StartsAtFile",
    "Written",
    "is_model",
    "keys_of",
    "marked",
    "members",
    "nearest_keys",
    "seconds_of",
    "sections_of",
]


SecretText = SecretStr
"""The type of a token or a password. Its value does not print itself; ``get_secret_value()`` gives it where it is used.
A configuration shows and writes the reference that gives it, or a mask."""
FORMS = "seconds, 'days:hours:minutes:seconds', or a mapping of days, hours, minutes and seconds, above zero"
_UNITS = ("days", "hours", "minutes", "seconds")
M = TypeVar("M")
REQUIRED: Final[Any] = object()
"""Default of a key that must be given."""
LISTS = (list, tuple, Sequence, MutableSequence, Iterable)
TABLES = (dict, Mapping, MutableMapping)
_ALLOWED = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text", "null": "null"}
_NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "num_train_epochs": "max_epochs",
    "epochs": "max_epochs",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "max_length": "seq_length",
    "cutoff_len": "seq_length",
    "max_grad_norm": "gradient_clip_val",
    "gradient_checkpointing": "activations_checkpoint_granularity",
    "save_steps": "every_n_train_steps",
    "eval_steps": "val_check_interval",
    "logging_steps": "log_every_n_steps",
    "output_dir": "exp_dir",
}
"""Names of keys in Transformers, TRL and LLaMA-Factory → names here that are not like them."""


class Section(BaseModel):
    """Base of sections; a third party's are the same."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    def changed(self, **values: Any) -> Self:
        """Return the section with other values, which are not checked."""
        return self.model_copy(update=values)

    def check(self) -> Iterable[tuple[str, str | NxdtError]]:
        """Yield (key, problem) for each combination that cannot work; the key is relative to the section. Called once
        the types are right. An error keeps its code."""
        return ()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the values of a model's section that a Hugging Face ``config.json`` (``model.model_config``) gives, by
        key, dotted for a section within the section; keys that the user gives win. None: it reads no such file.

        ``nxdt checkpoint import`` calls it, too. ``config_to_hf`` of the model's builder is its inverse
        (:class:`nxdt_core.protocols.model.ModelBuilder`).

        Example::

            @classmethod
            def from_hf(cls, hf):
                return {"hidden_size": hf["hidden_size"], "rope.theta": hf.get("rope_theta", 10_000.0)}

        Raises:
            NxdtError: the file asks for something that the model does not do.
            ValueError: the same, in one sentence.
        """
        return None

    @classmethod
    def hf_names(cls, hf: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the key of the section → key of that file that it comes from, so that messages name both. Called with
        what :meth:`from_hf` has read."""
        return {}


class ScheduleSection(Section):
    """Base of the sections of learning-rate schedules, for those that say more about themselves."""

    reads_max_steps: ClassVar[bool] = True
    """False where ``max_steps`` does not end the schedule; notes then leave it out."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both included; None means unbounded."""

    low: float | None = None
    high: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return pydantic's schema of a number within the bounds."""
        bounds = {"ge": self.low, "le": self.high}
        return {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}

    def describe(self) -> str:
        """Return a description of the bounds, to follow "an integer" or "a number"."""
        if self.low is not None and self.high is not None:
            return f"from {self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"of at least {self.low:g}"
        return "" if self.high is None else f"of at most {self.high:g}"


@dataclass(frozen=True, slots=True)
class DefaultsTo:
    """Where the key is not set, it takes the value of ``key``; the two may differ."""

    key: str


@dataclass(frozen=True, slots=True)
class PartOf:
    """The key counts some of what ``key`` counts: all parts together are no more than that."""

    key: str


class Secret:
    """The key holds a token or a password of another type than :data:`SecretText`: a value that is not a reference such
    as ``${oc.env:NAME}`` is masked wherever a configuration is shown or written. Give the field ``repr=False``, too, so
    that the section does not print it."""

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> Any:
        """Return the JSON Schema of a value that is written and never read back."""
        return {**handler(source), "writeOnly": True}


class StartsAtFile:
    """The key is an address to read from. A relative path starts at the directory of the file that sets it, as one of
    type ``Path`` does; ``scheme://…`` stays as it is."""

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> Any:
        """Return the JSON Schema of a text that is a path."""
        return {**handler(source), "format": "path"}


class NamesModel:
    """The key is text that may name a model of the Hugging Face hub, ``hf:owner/name``, as every path may. The run gets
    its path, and what the run writes has its commit."""


class Written:
    """The key is a path that a run writes to, so that it need not exist before."""


SourcePath = Annotated[str, StartsAtFile()]
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


Duration = PositiveInt | str | Mapping[str, int]
"""The type of a key that is a length of time."""


def seconds_of(value: Duration) -> float:
    """Return the seconds of ``1800``, ``00:00:30:00`` or ``{minutes: 30}``.

    Raises:
        ValueError: it is none of these, or not above zero.
    """
    if isinstance(value, int):
        value = {"seconds": value}
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != len(_UNITS) or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{value!r} is not a time")
        value = dict(zip(_UNITS, map(int, parts), strict=True))
    if not value.keys() <= set(_UNITS):
        raise ValueError(f"{sorted(value.keys() - set(_UNITS))} are not units")
    seconds = timedelta(**value).total_seconds()
    if seconds <= 0:
        raise ValueError("it is not above zero")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    name: str
    annotation: Any
    default: Any
    """Plain value, or :data:`REQUIRED`; None of a section that may be left out."""
    marks: tuple[Any, ...]
    """Marks that :data:`typing.Annotated` carries in addition to bounds."""
    section: type | None
    """The model, if the key is a section."""
    optional: bool
    """Whether ``null`` is allowed."""
    owner: type
    """The model that declares the key."""
    attribute: str
    """Name of the model's field, which may be another one."""

    def mark(self, kind: type[M]) -> M | None:
        """Return the mark of a class, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its values, without documentation and default."""
        schema = _schema_of(self.owner)
        property_schema: dict[str, Any] = _plain(schema["properties"][self.name], schema.get("$defs", {}))
        return property_schema

    def describe(self) -> str:
        """Return what is allowed, as the object of a sentence."""
        return _described(self.json_schema())


@cache
def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys that a section declares, in order."""
    keys: dict[str, Key] = {}
    for attribute, info in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
        annotation: Any = info.annotation
        for mark in info.metadata:
            annotation = Annotated[annotation, mark]
        one = [member for member in members(annotation) if member is not type(None)]
        section = one[0] if len(one) == 1 and is_model(one[0]) else None
        # A section's default is not made: pydantic would build a validator for each, and its keys have their own.
        default = None if section is not None else info.get_default(call_default_factory=True)
        keys[info.alias or attribute] = Key(
            name=info.alias or attribute,
            annotation=annotation,
            default=REQUIRED if info.is_required() else default,
            marks=tuple(mark for mark in info.metadata if not isinstance(mark, Range)),
            section=section,
            optional=len(one) < len(members(annotation)) or annotation is Any,
            owner=cls,
            attribute=attribute,
        )
    return keys


@cache
def sections_of(cls: type, path: str = "") -> dict[str, type]:
    """Return a model and those of all sections below it by key path, outer ones first."""
    sections = {path: cls}
    for name, key in keys_of(cls).items():
        if key.section is not None:
            sections |= sections_of(key.section, join(path, name))
    return sections


def is_model(cls: Any) -> bool:
    """Return whether a class has keys."""
    return isinstance(cls, type) and hasattr(cls, "__pydantic_fields__")


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; the annotation alone where it is none. Bounds and other marks are left out."""
    if get_origin(annotation) is Annotated:
        return members(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members(member))
    return (annotation,)


_MARKED_TYPES = ((Path, StartsAtFile()), (SecretStr, Secret()))
"""Types that have a mark by themselves."""


def marked(kinds: tuple[type, ...], annotation: Any, value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, type]]:
    """Yield where the scalars of a value are whose annotation has a mark of one of the kinds, or is inside one.

    Args:
        kinds: Classes of marks, such as :class:`Secret`; each scalar is yielded with its own.
        annotation: Of the value; may be a section.
        value: Plain data.
        path: Where it is.
    """
    if value is None:
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    marks = annotation.__metadata__ if origin is Annotated else [mark for of, mark in _MARKED_TYPES if of is annotation]
    if kind := next((kind for kind in kinds for mark in marks if isinstance(mark, kind)), None):
        yield from ((below, kind) for below, scalar in walk(value, path) if not isinstance(scalar, (dict, list)))
    elif origin is Annotated:
        yield from marked(kinds, annotation.__origin__, value, path)
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from marked(kinds, member, value, path)
    elif is_model(annotation) and isinstance(value, dict):
        for name, key in keys_of(annotation).items():
            if name in value:
                yield from marked(kinds, key.annotation, value[name], (*path, name))
    elif origin in TABLES and len(arguments) == 2 and isinstance(value, dict):
        for name, item in value.items():
            yield from marked(kinds, arguments[1], item, (*path, name))
    elif origin in LISTS and isinstance(value, list) and arguments:
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        of_items = arguments if fixed else arguments[:1] * len(value)
        for number, (of_item, item) in enumerate(zip(of_items, value, strict=False)):
            yield from marked(kinds, of_item, item, (*path, number))


@cache
def _schema_of(cls: Any) -> dict[str, Any]:
    schema: dict[str, Any] = cls.model_json_schema()
    return schema


def _plain(schema: Any, defs: Mapping[str, Any]) -> Any:
    """Return a schema with definitions in place of references to them."""
    if isinstance(schema, list):
        return [_plain(part, defs) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(defs[schema["$ref"].rpartition("/")[2]], defs)
    constraints = {name: part for name, part in schema.items() if name not in ("title", "default", "description")}
    properties = {name: _plain(part, defs) for name, part in schema.get("properties", {}).items()}
    return {name: properties if name == "properties" else _plain(part, defs) for name, part in constraints.items()}


def _described(schema: Mapping[str, Any]) -> str:
    """Return what a JSON Schema allows, as the object of a sentence."""
    return either(list(dict.fromkeys(_words(schema))))


def _words(schema: Mapping[str, Any]) -> list[str]:
    """The members of a union one by one, ``null`` last and numbers from the narrowest."""
    if "properties" in schema:
        return [f"a mapping of {', '.join(schema['properties'])}"]
    if "anyOf" in schema:
        order = {"boolean": 0, "integer": 1, "number": 2, "null": 9}
        members = sorted(schema["anyOf"], key=lambda member: order.get(member.get("type"), 3))
        return [word for member in members for word in _words(member)]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ["null" if value is None else repr(value) for value in values]
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        places = [_described(place) for place in schema["prefixItems"]]
        return [f"a list of {len(places)}: {', '.join(places)}"]
    if kind == "array":
        return [f"a list, each item {_described(schema.get('items', {}))}"]
    if kind == "object":
        inner = schema.get("additionalProperties")
        return [f"a mapping to {_described(inner)}" if isinstance(inner, Mapping) and inner else "a mapping"]
    if schema.get("format") == "path":
        return ["a path"]
    if kind is None:
        return ["any value"]
    bounds = Range(schema.get("minimum"), schema.get("maximum"))
    return [f"{_ALLOWED[kind]} {bounds.describe()}".rstrip()]


def nearest_keys(key: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known key paths that ``key`` was probably meant to be, at most two, best first."""
    section, _, name = key.rpartition(".")
    known = list(known)
    if meant := [path for path in known if path.rpartition(".")[2] == _NAMES_ELSEWHERE.get(name)]:
        return tuple(sorted(meant, key=lambda path: path.rpartition(".")[0] != section)[:2])
    here = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, here, n=1, cutoff=0.75)
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    # A name of another section must be nearer than one of the same section: there are ten times as many.
    names = {path.rpartition(".")[2]: path for path in reversed(known)}
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.87)
    nearest = [*(here[match] for match in close), *elsewhere, *(names[match] for match in similar)]
    if not nearest:
        nearest = [here[match] for match in difflib.get_close_matches(name, here, n=1, cutoff=0.6)]
    return tuple(dict.fromkeys(nearest))[:2]
