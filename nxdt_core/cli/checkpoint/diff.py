"""``nxdt checkpoint diff``: differences between two checkpoints, of any stores and in any layouts.

Tensors are compared bit by bit, a run of rows at a time, so that two checkpoints of any size pass through little
memory. Every byte that is compared was verified first. What is only a fact of the two saves (times, versions, meshes)
is not a difference; step and position are in the state as well and are found there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from nxdt_core.checkpoint.format.digested_files import read_whole
from nxdt_core.checkpoint.format.file_names import SECTIONS, is_state_name, step_name
from nxdt_core.checkpoint.format.manifest import Manifest, decode_rank_state, state_tensors
from nxdt_core.checkpoint.format.state_tree import ValueDifference, compare_trees
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry
from nxdt_core.checkpoint.read.load import check_fits, fill
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, as_named, named_config, open_one
from nxdt_core.cli.terminal import byte_bar, print_table
from nxdt_core.cli.verb import as_json, attributes, print_json, say, verb
from nxdt_core.distributed.buckets import buckets
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice

if TYPE_CHECKING:
    import torch

Subject = Literal["model", "optim", "state", "config"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
"""Parts that can be compared: the tensors of three sections, the state of each rank without its tensors, the
configuration."""

_BATCH_BYTES = 64 * 2**20
"""Size of the tensors that are read at once from each side; a single row of a larger tensor is read whole."""
_CHUNK_ELEMENTS = 2**20
"""Elements whose differences are computed at once, in float64."""
_Key = tuple[str, int]
"""Name of a tensor and first row."""
_ROWS = 20
"""Rows of each kind that a person is shown; ``--json`` has them all."""
_CELL = 60
"""Characters of a value that a person is shown."""


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
    values: list[ValueDifference] = []
    if "state" in subjects:
        states = [set(filter(is_state_name, side.manifest.files)) for side in (first, second)]
        for name in sorted(states[0] | states[1]):
            trees = [_state(side, name) if name in of else {} for side, of in zip((first, second), states, strict=True)]
            values += compare_trees(name, *trees)
    if "config" in subjects:
        values += compare_trees("config", first.manifest.facts.config, second.manifest.facts.config)
    return Difference(
        only_in=(tuple(only[0]), tuple(only[1])),
        tensors=tuple(differing),
        values=tuple(values),
        tensors_compared=compared,
    )


def _compare_section(
    first: Side, second: Side, section: str, names: Sequence[str], progress: Callable[[int], None]
) -> Iterator[TensorDifference]:
    tables = [side.manifest.tensors[section] for side in (first, second)]
    # A tensor that shares the memory of another is where that one is.
    left_table, right_table = ({name: table[table[name].same_as or name] for name in names} for table in tables)
    pairs = {name: (left_table[name], right_table[name]) for name in names}
    sums = {name: _Sums() for name in names}
    same_shape = {name: pair for name, pair in pairs.items() if pair[0].shape == pair[1].shape}
    for batch in _batches(same_shape):
        left = _read(first, {key: (region, same_shape[key[0]][0]) for key, region in batch.items()})
        right = _read(second, {key: (region, same_shape[key[0]][1]) for key, region in batch.items()})
        for key in batch:
            sums[key[0]].add(left[key], right[key])
            progress(left[key].nbytes)
    for name, (mine, other) in pairs.items():
        difference = TensorDifference(
            section=section, name=name, dtypes=(mine.dtype, other.dtype), shapes=(mine.shape, other.shape)
        )
        if name not in same_shape:
            yield difference
        elif mine.dtype != other.dtype or sums[name].elements:
            yield replace(
                difference,
                elements_differing=sums[name].elements,
                max_abs_difference=sums[name].largest,
                relative_norm=sums[name].relative_norm,
            )


def _batches(pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]) -> Iterator[dict[_Key, TensorSlice]]:
    """Yield runs of rows of the tensors, as many at a time as fit in a batch."""
    runs: list[tuple[_Key, TensorSlice, int]] = []
    for name, (mine, other) in pairs.items():
        row_bytes = math.prod(mine.shape[1:]) * max(ITEM_BYTES[mine.dtype], ITEM_BYTES[other.dtype])
        if not mine.shape:
            runs.append(((name, 0), TensorSlice((), ()), row_bytes))
            continue
        rows = max(1, _BATCH_BYTES // max(row_bytes, 1))
        for start in range(0, mine.shape[0], rows):
            count = min(rows, mine.shape[0] - start)
            region = TensorSlice((start,) + (0,) * (len(mine.shape) - 1), (count, *mine.shape[1:]))
            runs.append(((name, start), region, row_bytes * count))
    for batch in buckets(runs, lambda run: run[2], _BATCH_BYTES):
        yield {key: region for key, region, _ in batch}


def _read(side: Side, wanted: Mapping[_Key, tuple[TensorSlice, TensorEntry]]) -> dict[_Key, torch.Tensor]:
    """The regions, verified, on the host."""
    import torch

    tensors: dict[_Key, torch.Tensor] = {}
    rest = dict(wanted)
    with explained_os_errors(f"{side.storage.uri}/{side.manifest.prefix}"):
        while rest:  # no read takes a byte twice, as tensors that shared memory would
            by_place = {(entry.parts, region): key for key, (region, entry) in reversed(rest.items())}
            shards, entries = {}, {}
            check_fits(side.storage, side.manifest, [rest[key][1] for key in by_place.values()])
            for key in by_place.values():
                region, entry = rest.pop(key)
                tensors[key] = torch.empty(region.shape, dtype=getattr(torch, entry.dtype))
                shards[f"{key}"], entries[f"{key}"] = LocalShard(tensors[key], entry.shape, region), entry
            fill(side.storage, side.manifest, shards, entries)
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
            if same_bytes:
                continue
            other_value = other.double()
            if mine.dtype == other.dtype:
                differs = (_rows_of_bytes(mine) != _rows_of_bytes(other)).any(1)
            else:
                differs = (value != other_value) & ~(value.isnan() & other_value.isnan())
            if not differs.any():
                continue
            self.elements += int(differs.sum())
            distance = (value - other_value).abs()[differs]
            largest = float(distance.max())
            self.largest = math.nan if math.isnan(largest) or math.isnan(self.largest) else max(self.largest, largest)
            self._of_difference += float(distance.square().sum())


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _state(side: Side, name: str) -> Any:
    """The state's JSON; its tensors are named in it, and compared with the others of their section."""
    where = f"{side.storage.uri}/{side.manifest.prefix}{name}"
    with explained_os_errors(where):
        data = read_whole(side.storage, side.manifest, name)
    decode_rank_state(data, dict.fromkeys(state_tensors(side.manifest, name)), side.manifest, where=where)
    return json.loads(data)


@verb(
    f"nxdt checkpoint diff {EXAMPLE_URI}/step-00000020 {EXAMPLE_URI}/step-00000040",
    f"nxdt checkpoint diff {EXAMPLE_URI} s3://my-bucket/llama-tiny --only model --only optim",
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--only",
    "subjects",
    multiple=True,
    type=click.Choice(SUBJECTS),
    help="What to compare; may be given several times. Everything unless given.",
)
@named_config
@as_json
@click.pass_context
def diff(
    ctx: click.Context,
    first: str,
    second: str,
    subjects: tuple[str, ...],
    config: str | None,
    json_output: bool,
) -> None:
    """Compare the checkpoints A and B, bit by bit: addresses of steps, or of stores whose newest one is meant.

    They may be saved in different layouts. Exit status 1 where anything differs.
    """
    find, _ = as_named(config)
    sides = Side(*open_one(first, find)), Side(*open_one(second, find))
    addresses = [f"{side.storage.uri}/{step_name(side.manifest.step)}" for side in sides]
    chosen = [subject for subject in SUBJECTS if subject in subjects or not subjects]
    size = sum(entry.size_bytes for entry in sides[0].manifest.files.values())
    with byte_bar(size, "comparing") as progress:
        difference = compare_checkpoints(*sides, subjects=chosen, progress=progress)
    if json_output:
        tensors = [asdict(tensor) for tensor in difference.tensors]
        for tensor in tensors:  # JSON has no infinities and no NaN
            tensor |= {
                name: None for name, value in tensor.items() if isinstance(value, float) and not math.isfinite(value)
            }
        print_json(
            {
                "equal": difference.is_empty,
                "a": addresses[0],
                "b": addresses[1],
                "tensors_compared": difference.tensors_compared,
                "only_in_a": difference.only_in[0],
                "only_in_b": difference.only_in[1],
                "tensors": tensors,
                "values": [
                    {
                        **attributes(value, "where", "path"),
                        "a": value.values[0],
                        "b": value.values[1],
                        "only_in": None if value.only_in is None else "ab"[value.only_in],
                    }
                    for value in difference.values
                ],
            }
        )
        ctx.exit(0 if difference.is_empty else 1)
    for name, address in zip("AB", addresses, strict=True):
        say(f"{name}  {address}")
    if difference.is_empty:
        click.echo(f"They are equal, bit by bit: {difference.tensors_compared:,} tensors.")
        ctx.exit(0)
    for name, names in zip("AB", difference.only_in, strict=True):
        _print_some(f"Only in {name}", ("NAME",), [(tensor_name,) for tensor_name in names])
    _print_some(
        f"Tensors that differ, of {difference.tensors_compared:,} in both",
        ("ELEMENTS", "LARGEST", "RELATIVE", "SHAPES AND DTYPES", "NAME"),
        [_row(tensor) for tensor in difference.tensors],
    )
    rows = []
    for value in difference.values:
        texts = ["-" if value.only_in == 1 - side else repr(content) for side, content in enumerate(value.values)]
        cells = [text if len(text) <= _CELL else f"{text[: _CELL - 1]}…" for text in texts]
        rows.append((value.where, value.path, *cells))
    _print_some("Values that differ", ("IN", "KEY", "A", "B"), rows)
    ctx.exit(1)


def _print_some(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    click.echo(f"\n{title}: {len(rows):,}")
    print_table(header, rows[:_ROWS], right=("ELEMENTS", "LARGEST", "RELATIVE"))
    if len(rows) > _ROWS:
        click.echo(f"… and {len(rows) - _ROWS:,} more; --json has them all.")


def _row(tensor: TensorDifference) -> tuple[str, ...]:
    kinds = [
        f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"
        for shape, dtype in zip(tensor.shapes, tensor.dtypes, strict=True)
    ]
    kind = kinds[0] if kinds[0] == kinds[1] else " / ".join(kinds)
    numbers = ("", "", "")
    if tensor.elements_differing is not None:
        largest, relative = f"{tensor.max_abs_difference:.3g}", f"{tensor.relative_norm:.3g}"
        numbers = f"{tensor.elements_differing:,}", largest, relative
    return (*numbers, kind, f"{tensor.section}/{tensor.name}")
