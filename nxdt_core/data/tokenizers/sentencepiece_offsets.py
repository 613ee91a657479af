"""Positions of the pieces of a SentencePiece model in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nxdt_core.protocols.tokenizer import LocatedIds

__all__ = ["cut", "located"]


def cut(tokens: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """Yield ``text`` in parts, split before and after each of ``tokens``, with the position where each part begins."""
    at = 0
    for found in tokens.finditer(text):
        yield at, text[at : found.start()]
        yield found.start(), found[0]
        at = found.end()
    yield at, text[at:]


def located(processor: Any, text: str, tokens: re.Pattern[str], ids: Mapping[str, int]) -> LocatedIds:
    """Return the ids of ``text`` with their characters.

    Args:
        processor: of the model.
        text: what is tokenised.
        tokens: finds those that stand for themselves.
        ids: of these.
    """
    found: list[int] = []
    places: list[tuple[int, int]] = []
    for at, part in cut(tokens, text):
        if part in ids:
            found.append(ids[part])
            places.append((at, at + len(part)))
        elif part:
            pieces = processor.encode(part, return_type="proto").pieces
            found += [piece.id for piece in pieces]
            places += _places(processor, pieces, at)
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return LocatedIds(ids=np.array(found, dtype=np.int64), starts=starts, ends=ends)


def _places(processor: Any, pieces: Any, at: int) -> list[tuple[int, int]]:
    """Together the surfaces are the text. Of a character's bytes only the last has it; all of them are given it."""
    places: list[tuple[int, int]] = []
    for piece in pieces:
        places.append((at, at := at + len(piece.surface)))
    for number in reversed(range(len(places) - 1)):
        start, end = places[number]
        if start == end and processor.is_byte(pieces[number].id):
            places[number] = start, places[number + 1][1]
    return places
