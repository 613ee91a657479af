"""Matching of dotted module and parameter paths against the patterns of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["matches", "matches_any"]


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A leading ``*`` matches any depth, every other ``*`` one component."""
    parts = pattern.split(".")
    head = [r".*"] if parts[0] == "*" else [re.escape(parts[0]).replace(r"\*", "[^.]*")]
    rest = [r"[^.]*" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in parts[1:]]
    return re.compile(r"\.".join(head + rest))


def matches(pattern: str, path: str) -> bool:
    """Whether ``path`` as a whole matches ``pattern``."""
    return _compiled(pattern).fullmatch(path) is not None


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Whether ``path`` matches one of ``patterns``."""
    return any(matches(pattern, path) for pattern in patterns)
