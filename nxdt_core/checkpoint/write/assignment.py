"""Which rank writes what: each distinct box once, by one of the ranks that hold it, in balance. Torch-free.

Every rank derives the same answer from the same listings, so nothing has to be sent round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry, TensorPart
from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.parallel.piece import Box, Held, Listing, Place

__all__ = ["assign", "merge"]


def assign(listings: Sequence[Listing]) -> list[set[Place]]:
    """Return, by rank, the tensors whose box that rank writes.

    Large boxes are given away first, each to the holder with the fewest bytes so far; among equals, to the one that
    holds the least in all.

    Raises:
        TensorStateUnsupported: ranks disagree about a tensor, or do not hold all of it among them.
    """
    _check(listings)
    shared = _shared(listings)
    holders: dict[tuple[Place, Box], list[int]] = defaultdict(list)
    totals = [0] * len(listings)
    for rank, listing in enumerate(listings):
        for place, held in listing.items():
            if place not in shared and (held.box.elements or not _elements(held)):
                holders[place, held.box].append(rank)
                totals[rank] += _bytes(held)
    written = [0] * len(listings)
    chosen: list[set[Place]] = [set() for _ in listings]
    for (place, _), ranks in sorted(holders.items(), key=lambda item: -_bytes(listings[item[1][0]][item[0][0]])):
        writer = min(ranks, key=lambda rank: (written[rank], totals[rank], rank))
        written[writer] += _bytes(listings[writer][place])
        chosen[writer].add(place)
    return chosen


def merge(
    listings: Sequence[Listing], parts: Sequence[Mapping[Place, TensorPart]], sections: Sequence[str]
) -> dict[str, dict[str, TensorEntry]]:
    """Return the index of the whole checkpoint from the parts that each rank wrote."""
    shared = _shared(listings)
    written: dict[Place, list[TensorPart]] = defaultdict(list)
    for own in parts:
        for place, part in own.items():
            written[place].append(part)
    index: dict[str, dict[str, TensorEntry]] = {section: {} for section in sections}
    for listing in listings:
        for (section, name), held in listing.items():
            if name not in index[section]:
                index[section][name] = TensorEntry(
                    dtype=held.dtype,
                    shape=held.shape,
                    parts=tuple(sorted(written[section, name], key=lambda part: part.offsets)),
                    same_as=shared.get((section, name)),
                )
    return index


def _shared(listings: Sequence[Listing]) -> dict[Place, str]:
    """Tensors that are the same memory as another one on every rank that holds them → that one's name."""
    owners: dict[Place, set[str | None]] = defaultdict(set)
    for listing in listings:
        for place, held in listing.items():
            owners[place].add(held.same_as)
    single = {place: next(iter(names)) for place, names in owners.items() if len(names) == 1}
    return {place: owner for place, owner in single.items() if owner is not None and owners[place[0], owner] == {None}}


def _check(listings: Sequence[Listing]) -> None:
    first: dict[Place, Held] = {}
    boxes: dict[Place, set[Box]] = defaultdict(set)
    for listing in listings:
        for place, held in listing.items():
            known = first.setdefault(place, held)
            if (known.dtype, known.shape) != (held.dtype, held.shape):
                reason = f"ranks hold it as {known.dtype} {known.shape} and as {held.dtype} {held.shape}"
                raise TensorStateUnsupported(where="/".join(place), reason=reason)
            boxes[place].add(held.box)
    for place, held in first.items():
        found = sum(box.elements for box in boxes[place])
        if found != _elements(held):
            reason = f"of its {_elements(held)} elements the ranks hold {found}"
            raise TensorStateUnsupported(where="/".join(place), reason=reason)


def _elements(held: Held) -> int:
    return Box.whole(held.shape).elements


def _bytes(held: Held) -> int:
    return held.box.elements * ITEM_BYTES[held.dtype]
