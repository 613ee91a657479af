"""Reads the two metadata files of a distribution that concern plugins, without parsing what does not."""

from __future__ import annotations

import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from email.parser import HeaderParser
from functools import lru_cache
from importlib.metadata import Distribution
from typing import Any

from nxdt_core.api import ENTRY_POINT_GROUP

_VALUE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\s*:\s*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?(\s*\[.*\])?")

_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_CLAUSE = re.compile(rf"(>=|<=|>|<|==|!=)\s*({_RELEASE.pattern})")
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_RANGE = rf"{_CLAUSE.pattern}(?:\s*,\s*{_CLAUSE.pattern})*"
_OF_EXTRA = re.compile(r"\s*extra\s*==\s*(['\"])[\w.-]+\1\s*")
_PLAIN = re.compile(rf"[\w.-]+\s*(?:\[[\w\s,.-]*\]\s*)?(?:{_RANGE}|\(\s*{_RANGE}\s*\))?\s*")
_ON_CORE = re.compile(r"\s*nxdt[-_.]+core(?![\w.-])", re.IGNORECASE)
"""A ``Requires-Dist`` line on nxdt-core, in any spelling of its name."""
_SETTLED_NS = 2_000_000_000
"""A file that changed within this time may change again with the same timestamp, because file systems round it."""


class MalformedMetadata(Exception):
    """A metadata file cannot be read; the text is the reason."""


def version_of(status: os.stat_result) -> tuple[int, ...] | None:
    """Return values that differ between two versions of a file; None if the file is too new to distinguish them."""
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def plugin_entries(text: str) -> list[tuple[str, str]]:
    """Return the names and values of the group ``nxdt.plugins`` in an ``entry_points.txt``; other groups may be
    malformed.

    (:mod:`importlib.metadata` parses all groups at once and raises for everybody where one line is bad.)

    Raises:
        MalformedMetadata: a line of this group is not ``name = package.module``.
    """
    entries: dict[str, str] = {}
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            inside = line == f"[{ENTRY_POINT_GROUP}]"
        elif inside and line and not line.startswith(("#", ";")):
            name, equals, value = (part.strip() for part in line.partition("="))
            if not equals or not name or not _VALUE.fullmatch(value):
                raise MalformedMetadata(f"entry_points.txt has the line {line!r} in [{ENTRY_POINT_GROUP}]")
            if name in entries:
                raise MalformedMetadata(f"entry_points.txt names {name!r} twice in [{ENTRY_POINT_GROUP}]")
            entries[name] = re.sub(r"\s*\[.*\]$|\s+", "", value)
    return list(entries.items())


def read_core_metadata(dist: Distribution) -> tuple[str, str, tuple[str, ...]]:
    """Return name, version and the ``Requires-Dist`` lines on nxdt-core, markers included, from ``METADATA`` or
    ``PKG-INFO``.

    Raises:
        MalformedMetadata: the file is missing, is not UTF-8, or lacks a name or version.
    """
    try:
        text = dist.read_text("METADATA") or dist.read_text("PKG-INFO")
    except Exception as error:  # not UTF-8, a failing disk, or any error of a third-party finder
        raise MalformedMetadata(f"METADATA cannot be read: {error}") from error
    if not text:
        raise MalformedMetadata("METADATA is missing or empty")
    headers = HeaderParser().parsestr(re.split(r"\r?\n\r?\n", text, maxsplit=1)[0])
    name, version = headers.get("Name"), headers.get("Version")
    if not name or not version:
        raise MalformedMetadata(f"METADATA has no {'Version' if name else 'Name'}")
    requires = map(str, headers.get_all("Requires-Dist", ()))
    return str(name), str(version), tuple(filter(_ON_CORE.match, requires))


@lru_cache(maxsize=1024)
def admits(requirement: str, version: str) -> bool:
    """Return whether ``requirement`` (``nxdt-core>=0.1,<0.2``) admits ``version``; a marker that is false admits all.

    Ranges of plain release numbers are compared here; everything else goes to ``packaging``, whose import
    alone costs a fifth of the time in which ``nxdt plugins list`` answers.

    Raises:
        MalformedMetadata: the requirement cannot be parsed.
    """
    wanted, _, marker = requirement.partition(";")
    of_extra = _OF_EXTRA.fullmatch(marker) is not None
    if _PLAIN.fullmatch(wanted) and _RELEASE.fullmatch(version) and (of_extra or ";" not in requirement):
        return of_extra or all(
            _COMPARISONS[sign](_release(version), _release(bound)) for sign, bound in _CLAUSE.findall(wanted)
        )
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(requirement)
    except InvalidRequirement as error:
        raise MalformedMetadata(f"Requires-Dist has {requirement!r}") from error
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return True
    return parsed.specifier.contains(version, prereleases=True)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release for comparisons as of PEP 440, where missing parts are zeros."""
    return tuple(map(int, re.sub(r"(\.0+)+$", "", version).split(".")))
