"""Fields of a section as keys: annotation, default, and further settings of the annotation.

A section is a pydantic model. Pydantic is not imported here: who has such a class has imported it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from nxdt_core.config.annotations import Range, StartsAtFile
from nxdt_core.config.fields.types import described, schema_of
from nxdt_core.config.sources.node import join

__all__ = ["LISTS", "REQUIRED", "TABLES", "Key", "is_model", "keys_of", "members", "section_paths"]

M = TypeVar("M")

REQUIRED: Final[Any] = object()
"""Default of a key that must be given."""
LISTS = (list, tuple, Sequence, MutableSequence, Iterable)
TABLES = (dict, Mapping, MutableMapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    name: str
    annotation: Any
    default: Any
    """Plain value, or :data:`REQUIRED`."""
    marks: tuple[Any, ...]
    """What :data:`typing.Annotated` carries in addition to bounds."""
    section: type | None
    """The model, if the key is a section."""
    optional: bool
    """Whether ``null`` is allowed."""
    holds_path: bool
    """Whether a value may hold a path, which starts at the file that sets it."""
    owner: type
    """The model that declares the key."""
    attribute: str
    """Name of the model's field, which may be another one."""

    def mark(self, kind: type[M]) -> M | None:
        """Return the mark of a class, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its values."""
        return schema_of(self.owner, self.name)

    def describe(self) -> str:
        """Return what is allowed, as the object of a sentence."""
        return described(self.json_schema())


@cache
def keys_of(cls: type) -> dict[str, Key]:
    """Return the keys that a section declares, in order."""
    fields: Mapping[str, Any] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return {info.alias or name: _key(cls, name, info) for name, info in fields.items()}


def section_paths(cls: type, path: str = "") -> tuple[str, ...]:
    """Return the key paths of all sections below a model, outer ones first."""
    found: list[str] = []
    for name, key in keys_of(cls).items():
        if key.section is not None:
            here = join(path, name)
            found += [here, *section_paths(key.section, here)]
    return tuple(found)


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


def _key(cls: type, attribute: str, info: Any) -> Key:
    annotation: Any = info.annotation
    for mark in info.metadata:
        annotation = Annotated[annotation, mark]
    found = members(annotation)
    nested = [member for member in found if is_model(member)]
    return Key(
        name=info.alias or attribute,
        annotation=annotation,
        default=REQUIRED if info.is_required() else info.get_default(call_default_factory=True),
        marks=tuple(mark for mark in info.metadata if not isinstance(mark, Range)),
        section=nested[0] if nested and len([m for m in found if m is not type(None)]) == 1 else None,
        optional=type(None) in found or annotation is Any,
        holds_path=any(part is Path or isinstance(part, StartsAtFile) for part in _parts(annotation)),
        owner=cls,
        attribute=attribute,
    )


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and everything inside it; choices of a ``Literal`` and other sections are left out."""
    yield annotation
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _parts(annotation.__origin__)
    elif get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from _parts(inner)
