"""Texts as tokenizer libraries accept them, and positions of the tokens of a byte-level vocabulary in a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from nxdt_core.protocols.tokenizer import LocatedIds

__all__ = ["encoded", "located", "valid"]

T = TypeVar("T")


def valid(text: str) -> str:
    """``text`` with U+FFFD for each lone surrogate, which UTF-8 cannot express and most libraries refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encoded(encode: Callable[[list[str]], T], texts: Sequence[str]) -> T:
    """Return what ``encode`` of a library gives for ``texts``, made :func:`valid` only where it refuses them."""
    try:
        return encode(list(texts))
    except TypeError:
        return encode([*map(valid, texts)])


def located(text: str, ids: Sequence[int], widths: Sequence[int]) -> LocatedIds:
    """Return ``ids`` with the characters that their bytes belong to.

    Args:
        text: valid Unicode.
        ids: of all of it, in order.
        widths: bytes of each; together those of the text in UTF-8.
    """
    characters = np.repeat(np.arange(len(text), dtype=np.int64), [len(c.encode()) for c in text])
    behind = np.cumsum(widths, dtype=np.int64)
    starts = characters[behind - widths] if len(ids) else behind
    return LocatedIds(ids=np.array(ids, dtype=np.int64), starts=starts, ends=characters[behind - 1] + 1)
