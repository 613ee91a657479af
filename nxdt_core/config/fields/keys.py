"""Fields of a dataclass as keys of a section: shape, default, and further settings of the annotation."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nxdt_core.config.annotations import Range, Secret, StartsAtFile
from nxdt_core.config.fields.types import (
    Anything,
    Choice,
    FilePath,
    Hidden,
    Items,
    Mismatch,
    Nothing,
    OneOf,
    Scalar,
    Shape,
    Table,
    describe_value,
)
from nxdt_core.config.sources.node import join

__all__ = ["REQUIRED", "BadAnnotation", "Key", "Record", "keys_of", "section_paths", "shape_of"]

M = TypeVar("M")

REQUIRED: Any = MISSING
"""Default of a key that must be given."""

_LISTS = {list: list, tuple: tuple, Sequence: tuple, MutableSequence: list, Iterable: tuple}
_TABLES = (dict, Mapping, MutableMapping)


class BadAnnotation(Exception):
    """A dataclass has an annotation that no YAML value can be read into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    name: str
    shape: Shape
    default: Any
    """Plain value, or :data:`REQUIRED`."""
    marks: tuple[Any, ...]
    """What :data:`typing.Annotated` carries in addition to bounds."""
    section: type | None
    """The dataclass, if the key is a section."""
    optional: bool
    """Whether ``null`` is allowed."""
    owner: type
    """The dataclass that declares the key."""

    def mark(self, kind: type[M]) -> M | None:
        """Return the mark of a class, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass inside a list or mapping, whose keys have no separate key paths."""

    type: type

    def read(self, value: Any) -> Any:
        """Return an instance; unknown and missing keys are mismatches."""
        if not isinstance(value, Mapping):
            raise Mismatch(describe_value(value))
        keys = keys_of(self.type)
        unknown = [name for name in value if name not in keys]
        missing = [name for name, key in keys.items() if key.default is REQUIRED and name not in value]
        if unknown or missing:
            word = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
            raise Mismatch(f"a mapping with {word}")
        return self.type(**{name: keys[name].shape.read(item) for name, item in value.items()})

    def describe(self) -> str:
        """``a mapping of a, b and c``."""
        return f"a mapping of {', '.join(keys_of(self.type))}"

    def json_schema(self) -> dict[str, Any]:
        """Return an object that allows nothing else."""
        keys = keys_of(self.type)
        return {
            "type": "object",
            "properties": {name: key.shape.json_schema() for name, key in keys.items()},
            "required": [name for name, key in keys.items() if key.default is REQUIRED],
            "additionalProperties": False,
        }


@cache
def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys that a dataclass declares, in order.

    Raises:
        BadAnnotation: an annotation cannot be resolved or has no shape.
    """
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise BadAnnotation(f"the annotations of {cls.__name__} cannot be resolved: {error}") from error
    return {field.name: _key(cls, field, hints[field.name]) for field in fields(cls) if field.init}


def section_paths(cls: type, path: str = "") -> tuple[str, ...]:
    """Return the key paths of all sections below the dataclass, outer ones first."""
    found: list[str] = []
    for name, key in keys_of(cls).items():
        if key.section is not None:
            here = join(path, name)
            found += [here, *section_paths(key.section, here)]
    return tuple(found)


def _key(cls: type, field: Any, annotation: Any) -> Key:
    marks = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
    members = _members(annotation)
    nested = [member for member in members if is_dataclass(member)]
    section: Any = nested[0] if nested and len([m for m in members if m is not type(None)]) == 1 else None
    default = REQUIRED
    if field.default is not MISSING:
        default = field.default
    elif field.default_factory is not MISSING:
        default = field.default_factory()
    return Key(
        name=field.name,
        shape=shape_of(annotation, f"{cls.__name__}.{field.name}"),
        default=default,
        marks=tuple(mark for mark in marks if not isinstance(mark, Range)),
        section=section,
        optional=type(None) in members or annotation is Any,
        owner=cls,
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union; the annotation alone where it is none. ``Annotated`` is looked through."""
    if get_origin(annotation) is Annotated:
        return _members(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in _members(member))
    return (annotation,)


def shape_of(annotation: Any, where: str) -> Shape:
    """Return the shape of an annotation; ``where`` names the field in the error.

    Raises:
        BadAnnotation: no YAML value can have it.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = shape_of(annotation.__origin__, where)
        if any(isinstance(mark, Secret) for mark in annotation.__metadata__):
            return Hidden(inner)
        if any(isinstance(mark, StartsAtFile) for mark in annotation.__metadata__):
            return FilePath(str)
        bounds = next((mark for mark in annotation.__metadata__ if isinstance(mark, Range)), None)
        return Scalar(inner.type, bounds) if bounds is not None and isinstance(inner, Scalar) else inner
    if origin in (Union, types.UnionType):
        return _union(arguments, where)
    if origin is Literal:
        return Choice(arguments)
    if annotation in (Any, object):
        return Anything()
    if annotation in (None, type(None)):
        return Nothing()
    if annotation in (bool, int, float, str):
        return Scalar(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return FilePath()
    if isinstance(annotation, type) and is_dataclass(annotation):
        return Record(annotation)
    return _container(annotation, origin or annotation, arguments, where)


def _union(arguments: tuple[Any, ...], where: str) -> Shape:
    """Return the order of the members: ``null`` last, numbers from the narrowest."""
    order = {bool: 0, int: 1, float: 2}
    shapes = [shape_of(member, where) for member in arguments]
    numbers = {id(s): order.get(s.type, 3) if isinstance(s, Scalar) else 3 for s in shapes}
    return OneOf(tuple(sorted(shapes, key=lambda s: 9 if isinstance(s, Nothing) else numbers[id(s)])))


def _container(annotation: Any, origin: Any, arguments: tuple[Any, ...], where: str) -> Shape:
    if origin in _LISTS:
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            return Items(tuple(shape_of(argument, where) for argument in arguments), fixed=True)
        item = shape_of(arguments[0], where) if arguments else Anything()
        return Items((item,), make=_LISTS[origin])
    if origin in _TABLES:
        return Table(shape_of(arguments[1], where) if len(arguments) == 2 else Anything())
    raise BadAnnotation(f"{where} has the annotation {annotation!r}, which no YAML value can be read into")
