"""The nearest right key: among its neighbours first, then of the same or a similar name in other sections."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["nearest_keys"]


def nearest_keys(key: str, known: Sequence[str], limit: int = 2) -> tuple[str, ...]:
    """Return the known key paths that ``key`` was probably meant to be, best first; none where nothing is near."""
    section, _, name = key.rpartition(".")
    here = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, here, n=1, cutoff=0.75)
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    # A name of another section must be nearer than one of the same section: there are ten times as many.
    names = {path.rpartition(".")[2]: path for path in reversed(known)}
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.87)
    found = [*(here[match] for match in close), *elsewhere, *(names[match] for match in similar)]
    if not found:
        found = [here[match] for match in difflib.get_close_matches(name, here, n=1, cutoff=0.6)]
    return tuple(dict.fromkeys(found))[:limit]
