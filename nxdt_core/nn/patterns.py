"""Matching of dotted module and parameter paths against the patterns of plans and of initialisation rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["matches", "matches_any"]


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{_expression(pattern)})" for pattern in patterns) or r"(?!)")


def _expression(pattern: str) -> str:
    head, *rest = pattern.split(".")
    return r"\.".join([".*" if head == "*" else _one(head), *map(_one, rest)])


def _one(part: str) -> str:
    """Regular expression of one component of a path."""
    return "[^.]*".join(map(re.escape, part.split("*")))


def matches(pattern: str, path: str) -> bool:
    """Return whether the whole of ``path`` matches: a leading ``*`` stands for any depth, any other for one component.

    ``matches("layers.*.norm.weight", "layers.3.norm.weight")`` and ``matches("*.bias", "a.b.bias")`` are true.
    """
    return matches_any((pattern,), path)


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Return whether ``path`` matches one of ``patterns``."""
    return _compiled(tuple(patterns)).fullmatch(path) is not None
