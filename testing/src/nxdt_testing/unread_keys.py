"""Keys of a configuration section that no code reads: a user who sets one would notice no effect.

This is a check of source code, not of a run. A name that code reads anywhere counts as read, so a key with a common
name, such as ``name``, is never reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin

from nxdt_core.config.section import keys_of, members

__all__ = ["NamesRead", "names_read", "unread_keys", "unread_keys_of_package"]

_TAKE_ALL = frozenset({"__dict__", "asdict", "astuple", "fields", "model_dump", "vars"})
"""Names by which code reads all keys of a section at once."""


@dataclass(frozen=True, slots=True)
class NamesRead:
    """Names that source files read."""

    attributes: frozenset[str]
    """Attributes that are read, such as ``rank`` of ``config.rank``, and the names of functions and variables."""
    strings: frozenset[str]
    """Parts of strings that are dotted names, such as ``"model"`` and ``"rank"`` of ``"model.rank"``."""
    patterns: tuple[re.Pattern[str], ...]
    """Formatted strings that compose a name, such as ``f"create_{name}_logger"``."""

    def __contains__(self, name: str) -> bool:
        """Return whether the files read an attribute of this name, or have it in a string."""
        named = name in self.attributes or name in self.strings
        return named or any(pattern.fullmatch(name) for pattern in self.patterns)

    @property
    def take_all(self) -> bool:
        """True if some code reads all keys of a section at once, as ``model_dump`` does."""
        return not _TAKE_ALL.isdisjoint(self.attributes)


def names_read(sources: Iterable[Path], *, declarations: Collection[Path] = ()) -> NamesRead:
    """Return the names that Python source files read.

    Args:
        sources: files to parse.
        declarations: those of ``sources`` whose strings do not count, because they document keys.

    Raises:
        SyntaxError: a file is not valid Python.
    """
    attributes: set[str] = set()
    strings: set[str] = set()
    patterns: set[str] = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                attributes.add(node.id)
            elif path in declarations:
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"[\w.]+", node.value):
                    strings.update(node.value.split("."))
            elif isinstance(node, ast.JoinedStr):
                patterns.update(_patterns(node))
    return NamesRead(
        frozenset(attributes), frozenset(strings), tuple(re.compile(pattern) for pattern in sorted(patterns))
    )


def unread_keys(cls: type, names: NamesRead) -> list[str]:
    """Return the keys of the section ``cls`` that are not among ``names``, in their order.

    Left out are deprecated keys, and keys with one possible value.
    """
    unread = []
    for name, key in keys_of(cls).items():
        values = [member for member in members(key.annotation) if member is not type(None)]
        one_value = all(get_origin(value) is Literal and len(get_args(value)) == 1 for value in values)
        if name not in names and not one_value:
            unread.append(name)
    return unread


def unread_keys_of_package(cls: type) -> list[str]:
    """Return the keys that the package of the section ``cls`` adds, and that neither it nor the core reads.

    A package that takes all keys at once is not checked.
    """
    package = cls.__module__.partition(".")[0]
    names = _names_of_package(package)
    keys_of_package = {name for name, key in keys_of(cls).items() if key.owner.__module__.partition(".")[0] == package}
    unread = () if names.take_all else unread_keys(cls, names)
    return [name for name in unread if name in keys_of_package and not _core_reads(name)]


@cache
def _names_of_package(package: str) -> NamesRead:
    """Return what the Python files of a package or module read."""
    return names_read(_sources(package))


@cache
def _core_reads(name: str) -> bool:
    """Return whether code of the core reads an attribute of this name, such as ``lr`` of any optimizer."""
    word = re.compile(rb"\.%s\b|[\"']%s[\"']" % (2 * (re.escape(name.encode()),)))
    return any(word.search(path.read_bytes()) for path in _sources("nxdt_core"))


def _sources(package: str) -> list[Path]:
    """Return the Python files of a package, or the file of a module."""
    spec = find_spec(package)
    assert spec is not None, f"the package {package!r} cannot be found"
    if spec.submodule_search_locations is None:
        return [Path(str(spec.origin))]
    return [path for place in spec.submodule_search_locations for path in sorted(Path(place).rglob("*.py"))]


def _patterns(node: ast.JoinedStr) -> list[str]:
    """Return a regular expression for each dotted part of a formatted string that has a gap and some letters."""
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    parts = [part for part in text.split(".") if "*" in part and re.fullmatch(r"[\w*]*\w{3,}[\w*]*", part)]
    return [part.replace("*", r"\w+") for part in parts]
