"""Differences between two checkpoints, of any stores and in any layouts.

Tensors are compared bit by bit, a run of rows at a time, so that two checkpoints of any size pass through little
memory. Every byte that is compared was verified first. What is only a fact of the two saves (times, versions, meshes)
is not a difference; step and position are in the state as well and are found there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nxdt_core.checkpoint.format.digested_files import read_whole
from nxdt_core.checkpoint.format.file_names import SECTIONS, is_state_name
from nxdt_core.checkpoint.format.manifest import Manifest, decode_rank_state, state_tensors
from nxdt_core.checkpoint.format.state_tree import ValueDifference, compare_trees
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry
from nxdt_core.checkpoint.read.load import check_fits, fill
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.distributed.buckets import buckets
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.store import CheckpointStore

if TYPE_CHECKING:
    import torch


Subject = Literal["model", "optim", "state", "config"]
SUBJECTS: tuple[Subject, ...] = ("model", "optim", "state", "config")
"""Parts that can be compared: the tensors of three sections, the state of each rank without its tensors, the
configuration."""

_BATCH_BYTES = 64 * 2**20
"""Size of the tensors that are read at once from each side; a single row of a larger tensor is read whole."""
_CHUNK_ELEMENTS = 2**20
"""Elements whose differences are computed at once, in float64."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    storage: CheckpointStore
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that both have and that is not the same. Numbers are None where shapes differ: nothing was read."""

    section: str
    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    elements_differing: int | None = None
    """Elements that are not equal bit by bit; of tensors of two dtypes, those of another value."""
    max_abs_difference: float | None = None
    """Largest difference in the unit of the tensor; NaN where one side has no number."""
    relative_norm: float | None = None
    """L2 norm of the difference over that of the first side's tensor; infinite where that is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything in which two checkpoints differ."""

    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    """``section/name`` of tensors that only the first, and only the second has."""
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    tensors_compared: int

    @property
    def is_empty(self) -> bool:
        """True if the two checkpoints are equal."""
        return not (any(self.only_in) or self.tensors or self.values)


def compare_checkpoints(
    first: Side,
    second: Side,
    *,
    subjects: Sequence[Subject] = SUBJECTS,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Difference:
    """Compare the ``subjects`` of two checkpoints, tensor by tensor and value by value.

    Args:
        first: numbers are relative to it.
        second: the other one.
        subjects: parts of the checkpoints to compare.
        progress: called with the number of bytes of the first that were just compared.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
        StorageError: a store failed.
    """
    only: tuple[list[str], list[str]] = ([], [])
    differing: list[TensorDifference] = []
    compared = 0
    for section in (section for section in SECTIONS if section in subjects):
        indexes = [side.manifest.tensors.get(section, {}) for side in (first, second)]
        for mine, other, names in zip(indexes, reversed(indexes), only, strict=True):
            names += [f"{section}/{name}" for name in mine if name not in other]
        common = [name for name in indexes[0] if name in indexes[1]]
        compared += len(common)
        differing += _compare_section(first, second, section, common, progress)
    return Difference(
        only_in=(tuple(only[0]), tuple(only[1])),
        tensors=tuple(differing),
        values=tuple(_compare_values(first, second, subjects)),
        tensors_compared=compared,
    )


def _compare_section(
    first: Side, second: Side, section: str, names: Sequence[str], progress: Callable[[int], None]
) -> Iterator[TensorDifference]:
    pairs = {name: (_entry(first, section, name), _entry(second, section, name)) for name in names}
    sums = {name: _Sums() for name in names}
    same_shape = {name: pair for name, pair in pairs.items() if pair[0].shape == pair[1].shape}
    for batch in _batches(same_shape):
        left = _read(first, {key: (box, same_shape[key[0]][0]) for key, box in batch.items()})
        right = _read(second, {key: (box, same_shape[key[0]][1]) for key, box in batch.items()})
        for key in batch:
            sums[key[0]].add(left[key], right[key])
            progress(left[key].nbytes)
    for name, (mine, other) in pairs.items():
        if name not in same_shape:
            yield TensorDifference(
                section=section, name=name, dtypes=(mine.dtype, other.dtype), shapes=(mine.shape, other.shape)
            )
        elif mine.dtype != other.dtype or sums[name].elements:
            yield TensorDifference(
                section=section,
                name=name,
                dtypes=(mine.dtype, other.dtype),
                shapes=(mine.shape, other.shape),
                elements_differing=sums[name].elements,
                max_abs_difference=sums[name].largest,
                relative_norm=sums[name].relative_norm,
            )


def _entry(side: Side, section: str, name: str) -> TensorEntry:
    """Return the location of the tensor, or of the tensor whose memory it shares."""
    entry = side.manifest.tensors[section][name]
    return side.manifest.tensors[section][entry.same_as] if entry.same_as else entry


_Key = tuple[str, int]
"""Name of a tensor and first row."""


def _batches(pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]) -> Iterator[dict[_Key, Box]]:
    """Yield runs of rows of the tensors, as many at a time as fit in a batch."""
    runs: list[tuple[_Key, Box, int]] = []
    for name, (mine, other) in pairs.items():
        row_bytes = math.prod(mine.shape[1:]) * max(ITEM_BYTES[mine.dtype], ITEM_BYTES[other.dtype])
        for box in _runs(mine.shape, row_bytes):
            size = row_bytes * (box.shape[0] if box.shape else 1)
            runs.append(((name, box.offsets[0] if box.offsets else 0), box, size))
    for batch in buckets(runs, lambda run: run[2], _BATCH_BYTES):
        yield {key: box for key, box, _ in batch}


def _runs(shape: tuple[int, ...], row_bytes: int) -> Iterator[Box]:
    """Boxes of whole rows (indices of the first dimension) that fit into a batch and make up a tensor of ``shape``."""
    if not shape:
        yield Box((), ())
        return
    rows = max(1, _BATCH_BYTES // max(row_bytes, 1))
    for start in range(0, shape[0], rows):
        yield Box((start,) + (0,) * (len(shape) - 1), (min(rows, shape[0] - start), *shape[1:]))


def _read(side: Side, wanted: Mapping[_Key, tuple[Box, TensorEntry]]) -> dict[_Key, torch.Tensor]:
    """The boxes, verified, on the host."""
    import torch

    tensors: dict[_Key, torch.Tensor] = {}
    rest = dict(wanted)
    with explained_os_errors(f"{side.storage.uri}/{side.manifest.prefix}"):
        while rest:  # no read takes a byte twice, as tensors that shared memory would
            by_place = {(entry.parts, box): key for key, (box, entry) in reversed(rest.items())}
            pieces, entries = {}, {}
            check_fits(side.storage, side.manifest, [rest[key][1] for key in by_place.values()])
            for key in by_place.values():
                box, entry = rest.pop(key)
                tensors[key] = torch.empty(box.shape, dtype=getattr(torch, entry.dtype))
                pieces[f"{key}"], entries[f"{key}"] = Piece(tensors[key], entry.shape, box), entry
            fill(side.storage, side.manifest, pieces, entries)
    return tensors


class _Sums:
    """Collects what differs between the rows of two tensors."""

    def __init__(self) -> None:
        self.elements = 0
        self.largest = 0.0
        self._of_difference = 0.0
        """Sum of squares."""
        self._of_first = 0.0

    @property
    def relative_norm(self) -> float:
        """See :attr:`TensorDifference.relative_norm`."""
        if not self._of_first:
            return math.inf if self._of_difference else 0.0
        return math.sqrt(self._of_difference / self._of_first)

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take further rows into account."""
        import torch

        mine_all, other_all = first.reshape(-1), second.reshape(-1)
        for start in range(0, first.numel(), _CHUNK_ELEMENTS):
            mine, other = (tensor[start : start + _CHUNK_ELEMENTS] for tensor in (mine_all, other_all))
            same_bytes = mine.dtype == other.dtype and torch.equal(_rows_of_bytes(mine), _rows_of_bytes(other))
            value = mine.double()
            self._of_first += float(value.square().sum())
            if not same_bytes:
                self._add_different(mine, other, value)

    def _add_different(self, mine: torch.Tensor, other: torch.Tensor, value: torch.Tensor) -> None:
        other_value = other.double()
        if mine.dtype == other.dtype:
            differs = (_rows_of_bytes(mine) != _rows_of_bytes(other)).any(1)
        else:
            differs = (value != other_value) & ~(value.isnan() & other_value.isnan())
        if not differs.any():
            return
        self.elements += int(differs.sum())
        distance = (value - other_value).abs()[differs]
        largest = float(distance.max())
        self.largest = math.nan if math.isnan(largest) or math.isnan(self.largest) else max(self.largest, largest)
        self._of_difference += float(distance.square().sum())


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _compare_values(first: Side, second: Side, subjects: Sequence[Subject]) -> Iterator[ValueDifference]:
    if "state" in subjects:
        states = [set(filter(is_state_name, side.manifest.files)) for side in (first, second)]
        for name in sorted(states[0] | states[1]):
            trees = [_state(side, name) if name in of else {} for side, of in zip((first, second), states, strict=True)]
            yield from compare_trees(name, trees[0], trees[1])
    if "config" in subjects:
        yield from compare_trees("config", first.manifest.facts.config, second.manifest.facts.config)


def _state(side: Side, name: str) -> Any:
    """The state's JSON; its tensors are named in it, and compared with the others of their section."""
    where = f"{side.storage.uri}/{side.manifest.prefix}{name}"
    with explained_os_errors(where):
        data = read_whole(side.storage, side.manifest, name)
    decode_rank_state(data, dict.fromkeys(state_tensors(side.manifest, name)), side.manifest, where=where)
    return json.loads(data)
