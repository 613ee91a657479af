"""Saving one checkpoint: data files first, each with its digests, the manifest last.

Until the manifest exists nothing is visible; once it exists everything under it is complete and durable. A save
that fails leaves what was committed before and takes its own files away. Ranks write at the same time, each its share
of what it holds; the first commits once all are done, or none does.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.commit import clear_other_attempts, commit, prepare_step, withdraw
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import (
    SECTIONS,
    attempt_prefix,
    digests_name,
    state_name,
    step_name,
    step_prefix,
)
from nxdt_core.checkpoint.format.manifest import (
    FAST,
    STRONG,
    Algorithm,
    CheckpointFacts,
    FileEntry,
    Manifest,
    encode_facts,
)
from nxdt_core.checkpoint.format.shards import list_shards, write_listed
from nxdt_core.checkpoint.format.state_tree import encode_tree
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry, TensorPart
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.errors.checkpoints import CheckpointFilesMissing, SaveLacksElements, TensorStateUnsupported
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import Listing, LocalShard, ShardInfo, TensorKey, TensorSlice


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of tensors to the ranks that write them."""

    listings: Sequence[Listing]
    """Tensors that each rank holds."""
    mine: AbstractSet[TensorKey]
    """Tensors whose region this rank writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One save. It is equal on all ranks, except for :attr:`read` and :attr:`state`."""

    step: int
    """The number of optimizer steps done."""
    facts: CheckpointFacts
    """Further entries of the manifest; those of rank 0 count."""
    assignment: Assignment
    read: Callable[[Sequence[TensorKey]], Iterable[torch.Tensor]]
    """Yields tensors that this rank writes, in order; they need not be in memory all at once."""
    state: bytes | None
    """Content of this rank's file of state; None where it writes none."""


class Planner:
    """Assigns consecutive saves. While the listings of all ranks are unchanged, the ranks exchange only that fact.

    Listings of 64 ranks with 2,000 tensors each take 2.5 CPU-seconds on every rank, in which training waits.
    """

    def __init__(self, ranks: RankAgreement | None) -> None:
        self._ranks = ranks
        self._plan: Assignment | None = None

    def plan(self, prepare: Callable[[], Listing], *, where: str) -> Assignment:
        """Return the assignment of what all ranks hold. Collective: what ``prepare`` raises on one rank is raised on
        all.

        Args:
            prepare: returns what this rank holds.
            where: address of the save, for messages.
        """
        previous, rank, listings = self._plan, rank_of(self._ranks), list[Listing]()

        def is_unchanged() -> bool:
            listings.append(prepare())
            return previous is not None and listings[0] == previous.listings[rank]

        if all(on_all_ranks(self._ranks, is_unchanged, where=where)) and previous is not None:
            return previous
        of_ranks = on_all_ranks(self._ranks, lambda: listings[0], where=where)
        self._plan = Assignment(of_ranks, assign(of_ranks)[rank])
        return self._plan


def plan_save(
    storage: CheckpointStore,
    *,
    step: int,
    model: Mapping[str, torch.Tensor | LocalShard],
    optimizer: Mapping[str, torch.Tensor | LocalShard],
    state: Mapping[str, Any],
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    ties: Mapping[str, str] | None = None,
    planner: Planner | None = None,
    stage: Callable[[Mapping[TensorKey, LocalShard]], Mapping[TensorKey, LocalShard]] | None = None,
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
        planner: assigns the saves of a run; None assigns this one alone.
        stage: returns copies of the tensors that this rank writes, which the save then takes; None takes the tensors
            themselves. An error of it fails the save on all ranks.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes.
    """
    rank = rank_of(ranks)
    local_shards: dict[TensorKey, LocalShard] = {}
    encoded: list[bytes] = []

    def prepare() -> Listing:
        encode_facts(facts)
        data, state_tensors = encode_state(state, rank)
        encoded.append(data)
        listing: dict[TensorKey, ShardInfo] = {}
        for section, tensors in zip(SECTIONS, (model, optimizer, state_tensors), strict=True):
            section_ties = ties if ties is None or tensors is model else {}
            section_shards, section_listing = list_shards(section, tensors, section_ties)
            local_shards.update(section_shards)
            listing |= section_listing
        return listing

    assignment = (planner or Planner(ranks)).plan(prepare, where=f"{storage.uri}/{step_name(step)}")
    mine: Mapping[TensorKey, LocalShard] = {
        place: local for place, local in local_shards.items() if place in assignment.mine
    }
    unstaged: Exception | None = None
    try:
        mine = mine if stage is None else stage(mine)
    except Exception as error:  # the save itself reports it to all ranks
        unstaged = error

    def read(keys: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        if unstaged is not None:
            raise unstaged
        return (mine[key].tensor for key in keys)

    return SavePlan(step=step, facts=facts, assignment=assignment, read=read, state=encoded[0])


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


def assign(listings: Sequence[Listing]) -> list[set[TensorKey]]:
    """Return, by rank, the tensors whose region that rank writes.

    Large regions are given away first, each to the holder with the fewest bytes so far; among equals, to the one that
    holds the least in all.

    Raises:
        TensorStateUnsupported: ranks disagree about a tensor, or do not hold all of it among them.
    """
    first: dict[TensorKey, ShardInfo] = {}
    regions: dict[TensorKey, set[TensorSlice]] = defaultdict(set)
    for place, shard in chain.from_iterable(listing.items() for listing in listings):
        expected = first.setdefault(place, shard)
        if (expected.dtype, expected.shape) != (shard.dtype, shard.shape):
            reason = f"ranks hold it as {expected.dtype} {expected.shape} and as {shard.dtype} {shard.shape}"
            raise TensorStateUnsupported(where="/".join(place), reason=reason)
        regions[place].add(shard.region)
    for place, shard in first.items():
        whole, elements = math.prod(shard.shape), sum(region.elements for region in regions[place])
        if elements != whole:
            reason = f"of its {whole} elements the ranks hold {elements}"
            raise TensorStateUnsupported(where="/".join(place), reason=reason)
    shared = _shared(listings)
    holders: dict[tuple[TensorKey, TensorSlice], list[int]] = defaultdict(list)
    totals = [0] * len(listings)
    for rank, listing in enumerate(listings):
        for place, shard in listing.items():
            if place not in shared and (shard.region.elements or not math.prod(shard.shape)):
                holders[place, shard.region].append(rank)
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


def _bytes(shard: ShardInfo) -> int:
    return shard.region.elements * ITEM_BYTES[shard.dtype]


def save(
    storage: CheckpointStore,
    plan: SavePlan,
    *,
    ranks: RankAgreement | None = None,
    add_files: Callable[[Manifest], Mapping[str, FileEntry]] | None = None,
    before_commit: Callable[[Manifest], object] | None = None,
    check_in_time: Callable[[], None] = lambda: None,
    signer: Signer | None = None,
) -> Manifest:
    """Save what is planned and commit it. A step that is committed already is replaced.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        storage: the store to write to, the same for every rank.
        plan: what :func:`nxdt_core.checkpoint.plan_save` returned.
        ranks: of the run; None for a process that is alone.
        add_files: called on every rank once the files of all are durable, with the manifest so far; writes further
            ones below its prefix and returns their entries.
        before_commit: called on rank 0 once every file is durable, with the manifest that is about to be written. What
            it raises fails the save on all ranks, and nothing is committed.
        check_in_time: raises once this save was given up, and another one of the step may be under way.
        signer: signs the manifest, on rank 0; given on all ranks or on none. None leaves the checkpoint unsigned.

    Raises:
        StorageFull, StorageDenied, StorageError: the store failed; committed checkpoints are as they were, and what
            this save wrote is deleted as far as the store lets it.
        CheckpointConflict: another run committed the same step meanwhile.
        CheckpointFilesMissing: rank 0 does not see what was written, whole.
        SaveLacksElements: the tensors are not as many elements as the plan's facts count.
    """
    step, rank = plan.step, rank_of(ranks)
    digests: Algorithm = FAST if signer is None else STRONG
    where = f"{storage.uri}/{step_name(step)}"
    replaces: list[bytes | None] = []

    def begin() -> tuple[str, str]:
        with explained_os_errors(where):
            replaces.append(prepare_step(storage, step))
        now = datetime.now(UTC)  # the name of an attempt is that of no other, and sorts by time for people
        return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}", now.isoformat(timespec="seconds")

    def write() -> tuple[Mapping[TensorKey, TensorPart], Mapping[str, FileEntry]]:
        listing, mine = plan.assignment.listings[rank], plan.assignment.mine
        with explained_os_errors(where):
            writer = AttemptWriter(storage, attempt_prefix(step, attempt), digests)
            parts = write_listed(writer, {key: listing[key] for key in listing if key in mine}, plan.read, rank=rank)
            if plan.state is not None:
                with writer.file(state_name(rank)) as stream:
                    stream.write(plan.state)
        return parts, writer.entries

    def commit_on_first_rank() -> None:
        with explained_os_errors(where):
            stored, counted = manifest.stored_elements, manifest.facts.elements
            if counted and stored != counted:  # a reader would call it damaged
                reason = f"it would store {stored} elements of a model that has {counted}"
                raise SaveLacksElements(where=where, reason=reason)
            _check_visible(storage, manifest)
            if before_commit is not None:
                before_commit(manifest)
            check_in_time()
            commit(storage, manifest, replaces[0], signer=signer)

    def finish() -> None:
        clear_other_attempts(storage, manifest, check_in_time)
        with explained_os_errors(where):
            storage.after_commit(step_prefix(step))

    attempt, created = on_first_rank(ranks, begin, where=where)
    try:
        written = on_all_ranks(ranks, write, where=where)
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=created,
            facts=plan.facts,
            files={name: entry for _, entries in written for name, entry in entries.items()},
            tensors=merge(plan.assignment.listings, [parts for parts, _ in written], SECTIONS),
            digests=digests,
        )
        if add_files is not None:
            added = on_all_ranks(ranks, lambda: add_files(manifest), where=where)
            files = {name: entry for entries in (manifest.files, *added) for name, entry in entries.items()}
            manifest = replace(manifest, files=files)
        on_first_rank(ranks, commit_on_first_rank, where=where)
    except BaseException:
        if rank == 0:
            withdraw(storage, step, attempt)
        raise
    on_first_rank(ranks, finish, where=where)
    return manifest


def _check_visible(storage: CheckpointStore, manifest: Manifest) -> None:
    """Check that the store has truncated no file, and that no other rank wrote to its own machine's disk."""
    wanted = {name: entry.size_bytes for name, entry in manifest.files.items()}
    wanted |= {digests_name(name): entry.digests_bytes for name, entry in manifest.files.items()}
    sizes = {info.key: info.size_bytes for info in storage.list(manifest.prefix)}
    missing = [name for name, size in wanted.items() if sizes.get(manifest.prefix + name) != size]
    if missing:
        reason = f"rank 0 does not see {len(missing)} of {len(wanted)} files as they were written, first {missing[0]}"
        raise CheckpointFilesMissing(where=f"{storage.uri}/{manifest.prefix}", reason=reason)
