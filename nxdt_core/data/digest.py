"""Short digests of data and settings, the same on every machine and in every process."""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["digest"]

_BYTES = 12
"""96 bits: far beyond accidents, and short enough for a message."""


def digest(*parts: object) -> str:
    """Hexadecimal digest of ``parts``: bytes and arrays by content, everything else by its ``repr``.

    Each part is preceded by its length, so that moving a border between two of them changes the result.
    """
    state = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        if isinstance(part, np.ndarray):
            content: bytes | memoryview = np.ascontiguousarray(part).data.cast("B")
        else:
            content = part if isinstance(part, bytes) else repr(part).encode()
        state.update(f"{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()
