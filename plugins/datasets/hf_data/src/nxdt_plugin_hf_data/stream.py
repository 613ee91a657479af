"""Files read from their beginning to their end, cut into the samples that packing all of them would give.

The position is a place in the files, not in what was read ahead: the pass, the file within it, the row, and how many
of its tokens are behind. A resume reads that row again and nothing before it. Several streams can be one, and a stream
can be read in a random order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nxdt_core.data.cache import digest, file_digest
from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.data.sampler import Permutation
from nxdt_core.data.tokens import encode_documents
from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import DataFileUnreadable, TooFewTokens
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import IterableDataset, SplitName
from nxdt_plugin_hf_data.errors import (
    ColumnsDiffer,
    EmptyData,
    NothingToLearn,
    PaddedDocuments,
    RowsDiffer,
    RowTooLong,
)
from nxdt_plugin_hf_data.formats import read_rows
from nxdt_plugin_hf_data.rows import (
    SampleSettings,
    TextFraming,
    TokenColumns,
    check_ids,
    is_tokenised,
    row_sample,
    text_column,
    token_columns,
)

Ids = NDArray[np.integer]

_LOOKED_AT = 4096
"""Number of first rows with tokens among which something must be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place at which a sample begins."""

    epoch: int = 0
    file: int = 0
    """Number within the order of the pass."""
    row: int = 0
    token: int = 0
    """Token of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and its location."""

    place: Place
    path: Path
    ids: Ids
    labels: Ids | None = None
    documents: NDArray[np.int64] | None = None
    """Document of each token, as :meth:`TokenColumns.documents` numbers them."""


class FileStream(IterableDataset):
    """An iterable dataset over files of one source.

    Args:
        files: the files.
        key: key of the configuration, for errors.
        text_key: column of the text.
        framing: called where the files hold text.
        cutting: settings that make samples of the tokens.
        split: the split that they are.
        endless: begin again at the end of a pass; else one pass.
        seed: decides the order of the files in each pass; None takes them in theirs.

    Raises:
        NxdtError: the first rows are not as they should be.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        key: str,
        text_key: str,
        framing: Callable[[], TextFraming],
        cutting: SampleSettings,
        split: SplitName,
        endless: bool,
        seed: int | None,
    ) -> None:
        self._paths, self._key, self._text_key, self._framing = files, key, text_key, framing
        self._cutting, self._split = cutting, split
        self._endless = endless
        self._seed = seed
        self._place = Place()
        self._files = WatchedFiles(files, may_grow=False)
        self._packs = self._look()

    def __iter__(self) -> Iterator[Sample]:
        while True:
            begun = self._place
            left = yield from self._packed() if self._packs else self._whole()
            if self._place == begun == Place(epoch=begun.epoch):
                raise self._too_few(left)
            if not self._endless:
                self._place = Place(epoch=begun.epoch, file=len(self._paths))
                return
            self._place = Place(epoch=begun.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last sample that was yielded."""
        return asdict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``."""
        self._place = Place(**state)

    def fingerprint(self) -> str:
        """Digest of the files' content, of their order, and of all that makes samples of them."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        try:
            files = [file_digest(path) for path in self._paths]
        except OSError as error:
            raise DataFileUnreadable(path=str(error.filename), reason=error.strerror or str(error)) from error
        text = (self._text_key, self._framing().fingerprint()) if self._text else None
        return digest("stream", *files, self._seed, text, self._packs, self._cutting.seq_length, self._cutting.packing)

    def _look(self) -> bool:
        """Return whether rows are documents to pack, judged by those up to the first in which something is learnt."""
        lengths = np.empty(0, np.int64)
        for path in self._paths:
            for first, batch in read_rows(path, self._text_key):
                table = pa.Table.from_batches([batch])
                if not len(lengths):
                    self._first, self._columns = path, frozenset(table.column_names)
                    self._text = not is_tokenised(table)
                    if self._text:
                        return self._cutting.packs is not False
                self._compare(path, first, table)
                columns = self._checked(path, first, table)
                lengths = np.append(lengths, np.diff(columns.input_ids.offsets))
                if columns.teach():
                    return self._cutting.packs_rows_of(lengths, str(path))
                if np.count_nonzero(lengths) >= _LOOKED_AT:
                    raise self._nothing(f"in its first {len(lengths)} rows")
        if lengths.any():
            raise self._nothing("in each of its rows")
        raise self._too_few(0) if len(lengths) else EmptyData(key=self._key, path=self._names())

    def _packed(self) -> Generator[Sample, None, int]:
        """Samples of rows end to end; returns the tokens that are left at the end of the pass."""
        length = self._cutting.seq_length
        rows: deque[Row] = deque()  # rows that are not all behind
        behind = self._place.token  # of the first of them
        waiting = -behind
        for row in self._rows():
            if row.documents is not None and not row.documents.all():
                raise PaddedDocuments(path=str(row.path))
            if not len(row.ids):
                continue
            rows.append(row)
            waiting += len(row.ids)
            while waiting > length:
                sample = self._window(rows, behind)
                waiting -= length
                behind += length
                while behind >= len(rows[0].ids):
                    behind -= len(rows.popleft().ids)
                self._place = replace(rows[0].place, token=behind)
                yield sample
        return waiting

    def _window(self, rows: deque[Row], begin: int) -> Sample:
        """The sample from token ``begin`` of the first row on."""
        wanted = self._cutting.seq_length + 1
        tokens: list[Ids] = []
        labels: list[Ids] = []
        starts: list[int] = []
        filled = 0
        for row in rows:
            if filled:
                starts.append(filled)
            part = slice(begin, begin + wanted - filled)
            if row.documents is not None:
                starts += (filled + 1 + np.flatnonzero(np.diff(row.documents[part]))).tolist()
            tokens.append(row.ids[part])
            labels.append((row.ids if row.labels is None else row.labels)[part])
            filled += len(tokens[-1])
            begin = 0
            if filled == wanted:
                break
        inputs, targets = np.concatenate(tokens)[:-1], np.concatenate(labels)[1:]
        packing = self._cutting.packing
        return packing.sample(inputs.astype(np.int64), targets.astype(np.int64), np.array(starts, np.int64))

    def _whole(self) -> Generator[Sample, None, int]:
        """One sample per row."""
        for row in self._rows():
            tokens, length = len(row.ids), self._cutting.seq_length
            if tokens > length + 1:
                raise RowTooLong(path=str(row.path), row=row.place.row, found=tokens, seq_length=length)
            if tokens < length and self._cutting.packs is None:
                raise RowsDiffer(path=str(row.path), row=row.place.row, found=tokens, seq_length=length)
            self._place = replace(row.place, row=row.place.row + 1)
            yield row_sample(row.ids, row.labels, row.documents, seq_length=length, packing=self._cutting.packing)
        return 0

    def _rows(self) -> Iterator[Row]:
        """The rows of the pass from the place on."""
        begin, files = self._place, self._paths
        order = np.arange(len(files))
        if self._seed is not None:
            order = Permutation(len(files), seed=self._seed, epoch=begin.epoch).take(order)
        for number in range(begin.file, len(files)):
            path = files[order[number]]
            start = begin.row if number == begin.file else 0
            self._files.check(path)
            for first, batch in read_rows(path, self._text_key, start):
                table = pa.Table.from_batches([batch])
                self._compare(path, first, table)
                places = (Place(epoch=begin.epoch, file=number, row=row) for row in count(first))
                if self._text:
                    framing = self._framing()
                    texts = text_column(table, self._text_key, str(path), first)
                    encoded = encode_documents(texts, framing.tokenizer, bos_id=framing.bos_id, eos_id=framing.eos_id)
                    for place, tokens in zip(places, encoded, strict=False):
                        if len(tokens):
                            yield Row(place=place, path=path, ids=tokens)
                    continue
                columns = self._checked(path, first, table)
                for place, row in zip(places, range(batch.num_rows), strict=False):
                    ids, labels, documents = columns.row(row)
                    yield Row(place=place, path=path, ids=ids, labels=labels, documents=documents)

    def _checked(self, path: Path, first: int, table: pa.Table) -> TokenColumns:
        """Return the columns, whose tokens and labels that are learnt are of the vocabulary."""
        columns, limit = token_columns(table, str(path), first), self._cutting.vocab_size
        place = f"{path} (rows from {first})"
        check_ids(columns.input_ids.values[:], limit, place)
        if columns.labels is not None:
            check_ids(columns.labels.values[:][columns.learnt(0, len(columns.input_ids))], limit, place)
        return columns

    def _compare(self, path: Path, first: int, table: pa.Table) -> None:
        """Hold the columns to those of the first rows."""
        columns, wanted = sorted(table.column_names), sorted(self._columns)
        if columns != wanted:
            raise ColumnsDiffer(
                path=str(path), row=first, columns=tuple(columns), first=str(self._first), wanted=tuple(wanted)
            )

    def _names(self) -> str:
        return ", ".join(map(str, self._paths[:3]))

    def _nothing(self, where: str) -> NxdtError:
        return NothingToLearn(key=self._key, path=self._names(), where=where)

    def _too_few(self, tokens: int) -> NxdtError:
        length = self._cutting.seq_length
        return TooFewTokens(split=self._split, found=tokens, needed=length + 1, seq_length=length)


class Interleave(IterableDataset):
    """Endless streams by weight: the next sample is of the one that is furthest behind its share.

    Args:
        streams: endless ones.
        weights: weight of each stream, above 0.
    """

    def __init__(self, streams: Sequence[IterableDataset], weights: Sequence[float]) -> None:
        self._streams = streams
        self._shares = np.array(weights, np.float64) / np.sum(weights)
        self._drawn = np.zeros(len(streams), np.int64)

    def __iter__(self) -> Iterator[Sample]:
        iterators = [iter(stream) for stream in self._streams]
        while True:
            number = int(np.argmax(self._shares * (self._drawn.sum() + 1) - self._drawn))
            sample = next(iterators[number])
            self._drawn[number] += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples drawn from each stream, and the position of each."""
        return {"drawn": self._drawn.tolist(), "streams": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after what was drawn."""
        self._drawn = np.array(state["drawn"], np.int64)
        for stream, inner in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(inner)

    def fingerprint(self) -> str:
        """Digest of the streams and their shares."""
        return digest("interleave", *(stream.fingerprint() for stream in self._streams), self._shares)


class Blocks(IterableDataset):
    """A stream read ahead by blocks, each of which is taken in a random order.

    The position is that of the stream before the block, and the number of samples taken from the block. A resume reads
    the block again, so that the state contains no samples.

    Args:
        stream: the samples.
        size: samples of a block.
        seed: decides, with the number of the block, its order.
    """

    def __init__(self, stream: IterableDataset, *, size: int, seed: int) -> None:
        self._stream = stream
        self._size = size
        self._seed = seed
        self._before = stream.state_dict()
        self._block = self._taken = 0

    def __iter__(self) -> Iterator[Sample]:
        self._stream.load_state_dict(self._before)
        samples = iter(self._stream)
        while block := [sample for _, sample in zip(range(self._size), samples, strict=False)]:
            order = Permutation(len(block), seed=self._seed, epoch=self._block).take(np.arange(len(block)))
            after = self._stream.state_dict()
            for number in order[self._taken :].tolist():
                self._taken += 1
                yield block[number]
            self._before, self._block, self._taken = after, self._block + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position before the block, the block's number, and how many of its samples were taken."""
        return {"stream": self._before, "block": self._block, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were taken."""
        self._before, self._block, self._taken = state["stream"], state["block"], state["taken"]

    def fingerprint(self) -> str:
        """Digest of the stream and of the order."""
        return digest("blocks", self._stream.fingerprint(), self._size, self._seed)
