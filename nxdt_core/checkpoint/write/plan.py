"""The plan of a save: the tensors that each rank writes, agreed by all ranks, and those that it holds.

Each distinct box is written once, by one of the ranks that hold it, in balance. Every rank derives the same answer from
the same listings, so nothing else has to be sent round.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, rank_of
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import SECTIONS, state_name, step_name
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, encode_facts
from nxdt_core.checkpoint.format.shards import write_pieces
from nxdt_core.checkpoint.format.state_tree import encode_tree
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry, TensorPart
from nxdt_core.checkpoint.pieces import list_pieces
from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.piece import Box, Listing, Piece, ShardInfo, TensorKey
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

__all__ = [
    "Assignment",
    "LocalPlan",
    "Planner",
    "SavePlan",
    "Write",
    "agree_on_assignment",
    "assign",
    "encode_state",
    "merge",
    "plan_save",
    "prepare_local_plan",
    "write_local_plan",
]


Write = Callable[[AttemptWriter, AbstractSet[TensorKey]], Mapping[TensorKey, TensorPart]]
"""Writes the tensors that were assigned to this rank; returns the location of each."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of tensors to the ranks that write them."""

    listings: Sequence[Listing]
    """Tensors that each rank holds."""
    mine: AbstractSet[TensorKey]
    """Tensors whose box this rank writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One save. It is equal on all ranks, except for what each rank writes."""

    step: int
    """The number of optimizer steps done."""
    facts: CheckpointFacts
    """Further entries of the manifest; those of rank 0 count."""
    assignment: Assignment
    write: Write
    """Writes the tensors of this rank, which need not be in memory all at once."""


def plan_save(
    storage: CheckpointStore,
    *,
    step: int,
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    ties: Mapping[str, str] | None = None,
) -> SavePlan:
    """Check everything that is to be saved, before anything is written, and share the writing. Collective.

    Ranks may hold different tensors (stages of a pipeline) and different parts of one (DTensors); what several hold
    identically is written by one of them.

    Args:
        storage: the store that the save will go to; only named in messages here.
        step: the number of optimizer steps done.
        model: parameters and buffers by their global names.
        optimizer: ``<parameter name>/<state name>`` → tensor.
        state: of this rank: JSON-able tree with plain tensors as leaves: positions, random states, schedules.
        facts: further entries of the manifest; those of rank 0 count.
        ranks: of the run; None for a process that is alone.
        ties: of the model's plan, name of the user → name of the owner; where ``model`` holds both, the user is not
            stored. None compares addresses, which lazy devices do not have. A training session passes ``{}``,
            since the ``state_dict`` of a parallel model has a tied parameter once.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes.
    """
    rank = rank_of(ranks)
    shares: list[LocalPlan] = []

    def prepare() -> Listing:
        encode_facts(facts)
        shares.append(prepare_local_plan(model, optimizer, state, rank=rank, ties=ties))
        return shares[0].listing

    assignment = agree_on_assignment(ranks, prepare, where=f"{storage.uri}/{step_name(step)}")
    return SavePlan(
        step=step,
        facts=facts,
        assignment=assignment,
        write=lambda writer, mine: write_local_plan(writer, shares[0], mine, rank=rank),
    )


def agree_on_assignment(ranks: RankAgreement | None, prepare: Callable[[], Listing], *, where: str) -> Assignment:
    """Gather what all ranks hold and share the writing. Collective: what ``prepare`` raises on one is raised on all."""
    listings = on_all_ranks(ranks, prepare, where=where)
    return Assignment(listings, assign(listings)[rank_of(ranks)])


class Planner:
    """Assigns consecutive saves. While the listings of all ranks are unchanged, the ranks exchange only that fact.

    Listings of 64 ranks with 2,000 tensors each take 2.5 CPU-seconds on every rank, in which training waits.
    """

    def __init__(self, ranks: RankAgreement | None) -> None:
        self._ranks = ranks
        self._plan: Assignment | None = None

    def plan(self, prepare: Callable[[], Listing], *, where: str) -> Assignment:
        """Return the answer of :func:`agree_on_assignment`, made once."""
        if self._plan is None:
            self._plan = agree_on_assignment(self._ranks, prepare, where=where)
            return self._plan
        listing = self._plan.listings[rank_of(self._ranks)]
        listings: list[Listing] = []

        def is_known() -> bool:
            listings.append(prepare())
            return listings[0] == listing

        if not all(on_all_ranks(self._ranks, is_known, where=where)):
            self._plan = agree_on_assignment(self._ranks, lambda: listings[0], where=where)
        return self._plan


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The tensors and the state of this rank, as one save takes them."""

    pieces: Mapping[TensorKey, Piece]
    listing: Listing
    state: bytes
    """JSON of the rank's state; its tensors are among the pieces."""


def prepare_local_plan(
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    *,
    rank: int,
    ties: Mapping[str, str] | None = None,
) -> LocalPlan:
    """Check everything of this rank, before anything is written anywhere. The pieces are the tensors' own memory.

    ``ties``: as of :func:`plan_save`.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes.
    """
    encoded, state_tensors = encode_state(state, rank)
    pieces: dict[TensorKey, Piece] = {}
    listing: dict[TensorKey, ShardInfo] = {}
    for section, tensors in zip(SECTIONS, (model, optimizer, state_tensors), strict=True):
        section_pieces, section_shards = list_pieces(section, tensors, ties if ties is None or tensors is model else {})
        pieces |= {(section, name): piece for name, piece in section_pieces.items()}
        listing |= {(section, name): shard for name, shard in section_shards.items()}
    return LocalPlan(pieces, listing, encoded)


def encode_state(state: Mapping[str, Any], rank: int) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the JSON of ``state``, and the tensors in it under names that begin with the rank."""
    tensors: dict[str, torch.Tensor] = {}

    def put_tensor(at: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = f"rank-{rank:05d}{at}"
        tensors[name] = value
        return name

    tree = encode_tree(state, put_tensor=put_tensor)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode(), tensors


def write_local_plan(
    writer: AttemptWriter, share: LocalPlan, mine: AbstractSet[TensorKey], *, rank: int
) -> dict[TensorKey, TensorPart]:
    """Write this rank's state and the pieces that were assigned to it, and return the location of each piece."""
    parts: dict[TensorKey, TensorPart] = {}
    for section in SECTIONS:
        chosen = {name: piece for (of, name), piece in share.pieces.items() if of == section and (of, name) in mine}
        parts |= {(section, name): part for name, part in write_pieces(writer, section, chosen, rank=rank).items()}
    with writer.file(state_name(rank)) as stream:
        stream.write(share.state)
    return parts


def assign(listings: Sequence[Listing]) -> list[set[TensorKey]]:
    """Return, by rank, the tensors whose box that rank writes.

    Large boxes are given away first, each to the holder with the fewest bytes so far; among equals, to the one that
    holds the least in all.

    Raises:
        TensorStateUnsupported: ranks disagree about a tensor, or do not hold all of it among them.
    """
    _check(listings)
    shared = _shared(listings)
    holders: dict[tuple[TensorKey, Box], list[int]] = defaultdict(list)
    totals = [0] * len(listings)
    for rank, listing in enumerate(listings):
        for place, shard in listing.items():
            if place not in shared and (shard.box.elements or not _elements(shard)):
                holders[place, shard.box].append(rank)
                totals[rank] += _bytes(shard)
    written = [0] * len(listings)
    chosen: list[set[TensorKey]] = [set() for _ in listings]
    for (place, _), ranks in sorted(holders.items(), key=lambda item: -_bytes(listings[item[1][0]][item[0][0]])):
        writer = min(ranks, key=lambda rank: (written[rank], totals[rank], rank))
        written[writer] += _bytes(listings[writer][place])
        chosen[writer].add(place)
    return chosen


def merge(
    listings: Sequence[Listing], parts: Sequence[Mapping[TensorKey, TensorPart]], sections: Sequence[str]
) -> dict[str, dict[str, TensorEntry]]:
    """Return the index of the whole checkpoint from the parts that each rank wrote."""
    shared = _shared(listings)
    written: dict[TensorKey, list[TensorPart]] = defaultdict(list)
    for rank_parts in parts:
        for place, part in rank_parts.items():
            written[place].append(part)
    index: dict[str, dict[str, TensorEntry]] = {section: {} for section in sections}
    for listing in listings:
        for (section, name), shard in listing.items():
            if name not in index[section]:
                index[section][name] = TensorEntry(
                    dtype=shard.dtype,
                    shape=shard.shape,
                    parts=tuple(sorted(written[section, name], key=lambda part: part.offsets)),
                    same_as=shared.get((section, name)),
                )
    return index


def _shared(listings: Sequence[Listing]) -> dict[TensorKey, str]:
    """Tensors that are the same memory as another one on every rank that holds them → that one's name."""
    owners: dict[TensorKey, set[str | None]] = defaultdict(set)
    for listing in listings:
        for place, shard in listing.items():
            owners[place].add(shard.same_as)
    single = {place: next(iter(names)) for place, names in owners.items() if len(names) == 1}
    return {place: owner for place, owner in single.items() if owner is not None and owners[place[0], owner] == {None}}


def _check(listings: Sequence[Listing]) -> None:
    first: dict[TensorKey, ShardInfo] = {}
    boxes: dict[TensorKey, set[Box]] = defaultdict(set)
    for listing in listings:
        for place, shard in listing.items():
            expected = first.setdefault(place, shard)
            if (expected.dtype, expected.shape) != (shard.dtype, shard.shape):
                reason = f"ranks hold it as {expected.dtype} {expected.shape} and as {shard.dtype} {shard.shape}"
                raise TensorStateUnsupported(where="/".join(place), reason=reason)
            boxes[place].add(shard.box)
    for place, shard in first.items():
        elements = sum(box.elements for box in boxes[place])
        if elements != _elements(shard):
            reason = f"of its {_elements(shard)} elements the ranks hold {elements}"
            raise TensorStateUnsupported(where="/".join(place), reason=reason)


def _elements(shard: ShardInfo) -> int:
    return Box.whole(shard.shape).elements


def _bytes(shard: ShardInfo) -> int:
    return shard.box.elements * ITEM_BYTES[shard.dtype]
