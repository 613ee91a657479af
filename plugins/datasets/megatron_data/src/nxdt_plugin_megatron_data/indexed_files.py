"""Megatron-Core's ``.idx`` and ``.bin`` files (``megatron/core/datasets/indexed_dataset.py``), read and written.

All numbers are little-endian. ``.idx`` is a header and three arrays, with a fourth in multimodal files::

    magic 9 bytes · version uint64 = 1 · dtype uint8 · sequences uint64 · document borders uint64
    lengths int32 [sequences] · pointers int64 [sequences] · borders int64 [document borders] · (modes int8 [sequences])

``.bin`` is nothing but tokens. A pointer is the byte in it at which a sequence begins. Sequence ``borders[i]`` is the
first of document i; the last border is the number of sequences. A text that was not split into sentences is one
sequence, and Megatron's GPT data sets know sequences only: what they call a document is one.

Both files are checked whole when they are opened. The index is mapped. Tokens are read: a mapped file that is truncated
kills the process, and a read raises an error.
"""

from __future__ import annotations

import difflib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.errors.data import DataFileChanged, DataFileUnreadable
from nxdt_core.system.regular_files import read_text, replacing, require_fetched
from nxdt_plugin_megatron_data.errors import BadIndexFile, DataShorterThanIndex, IndexedFileMissing

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""magic, version, code of the dtype, number of sequences, number of borders"""

DTYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
"""Dtypes by the code that a header carries."""

_TOKENS = 1 << 22
"""Tokens that are read at a time."""
_UINT16_BELOW = 65500
"""Vocabularies that Megatron-Core's preprocessing stores as uint16."""


def dtype_for(vocab_size: int) -> np.dtype[np.generic]:
    """Return the type of tokens that Megatron-Core's preprocessing takes for a vocabulary."""
    return np.dtype("<u2") if vocab_size < _UINT16_BELOW else np.dtype("<i4")


def idx_path(prefix: Path) -> Path:
    """``P.idx``; a prefix may hold dots."""
    return prefix.with_name(f"{prefix.name}.idx")


def bin_path(prefix: Path) -> Path:
    """``P.bin``"""
    return prefix.with_name(f"{prefix.name}.bin")


class IndexedTokens:
    """The sequences of one prefix. The arrays are views of the mapped index: none is read before it is used.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        key: what named it, for errors.

    Raises:
        IndexedFileMissing: one of the two files is not there.
        DataFileUnreadable: one of them is a Git LFS pointer, or may not be read.
        BadIndexFile: the index is damaged, cut off, or of another format.
        DataShorterThanIndex: the tokens end too early.
    """

    def __init__(self, prefix: Path, key: str = "data.data_prefix") -> None:
        self.prefix = prefix
        index, data = idx_path(prefix), bin_path(prefix)
        for path in (index, data):
            if not path.is_file():
                names = sorted(other.stem for other in prefix.parent.glob("*.idx"))
                close = difflib.get_close_matches(prefix.name, names, n=3, cutoff=0.5)
                candidates = tuple(str(prefix.parent / name) for name in close)
                raise IndexedFileMissing(key=key, path=str(path), candidates=candidates)
            try:
                require_fetched(path)
            except OSError as error:
                raise DataFileUnreadable(path=str(path), reason=error.strerror or str(error)) from error
        # An empty file cannot be mapped.
        empty = index.stat().st_size == 0
        raw = np.empty(0, np.uint8) if empty else np.memmap(index, dtype=np.uint8, mode="r").view(np.ndarray)
        if len(raw) < HEADER.size or raw[: len(MAGIC)].tobytes() != MAGIC:
            raise BadIndexFile(path=str(index), reason=f"it does not begin with {MAGIC!r}")
        _, version, code, sequences, borders = HEADER.unpack(raw[: HEADER.size].tobytes())
        if version != VERSION or code not in DTYPES or DTYPES[code].kind not in "iu":
            raise BadIndexFile(path=str(index), reason=f"version {version} with the type {code} of tokens is unknown")
        sizes = [*accumulate((HEADER.size, 4 * sequences, 8 * sequences, 8 * borders))]  # exact, unlike numpy's sums
        if len(raw) not in (sizes[-1], sizes[-1] + sequences):
            reason = f"it has {len(raw)} bytes; {sequences} sequences and {borders} document borders need {sizes[-1]}"
            raise BadIndexFile(path=str(index), reason=reason)
        self.dtype = DTYPES[code]
        """Type of a token."""
        self.lengths: NDArray[np.int32] = raw[sizes[0] : sizes[1]].view("<i4")
        """[sequences] tokens of each."""
        self.pointers: NDArray[np.int64] = raw[sizes[1] : sizes[2]].view("<i8")
        """[sequences] byte of ``.bin`` at which each begins."""
        self.borders: NDArray[np.int64] = raw[sizes[2] : sizes[3]].view("<i8")
        """[documents + 1] first sequence of each document, and the number of sequences."""
        self.modes: NDArray[np.int8] | None = raw[sizes[3] :].view("i1") if len(raw) > sizes[3] else None
        """[sequences] of multimodal files; None in others."""
        if len(self.borders) and (self.borders[0] != 0 or self.borders[-1] != len(self)):
            reason = f"its documents end at sequence {self.borders[-1]} of {len(self)}"
        elif (np.diff(self.borders) < 0).any():
            reason = "its document borders do not ascend"
        elif len(self) and (self.lengths.min() < 0 or self.pointers.min() < 0):
            reason = "it holds a negative length or place"
        elif (self.pointers % self.dtype.itemsize).any():
            reason = f"a sequence begins within a token of {self.dtype.itemsize} bytes"
        else:
            reason = ""
        if reason:
            raise BadIndexFile(path=str(index), reason=reason)
        # Unsigned, because a damaged pointer may be close to the maximum of int64.
        ends = self.pointers.view("<u8") + self.lengths.astype("<u8") * np.uint64(self.dtype.itemsize)
        size, needed = data.stat().st_size, int(ends.max(initial=0))
        if size < needed:
            raise DataShorterThanIndex(path=str(data), found=size, needed=needed)
        if self.total_tokens() > size // self.dtype.itemsize:  # indices grow with the tokens: they could be endless
            reason = f"its sequences have {self.total_tokens()} tokens, and {data} has {size // self.dtype.itemsize}"
            raise BadIndexFile(path=str(index), reason=reason)
        self._data = data
        self._file = data.open("rb", buffering=0)
        self._data_bytes = size
        self._index = WatchedFiles([index], may_grow=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int, /) -> NDArray[Any]:
        return self.tokens(int(self.pointers[sequence]) // self.dtype.itemsize, int(self.lengths[sequence]))

    def check(self) -> None:
        """See that the index, whose arrays are mapped, has its size.

        Raises:
            DataFileChanged: it has not.
        """
        self._index.check()

    def tokens(self, begin: int, count: int) -> NDArray[Any]:
        """Return ``count`` tokens of ``.bin`` from token ``begin`` on, across the borders of sequences.

        Raises:
            DataFileChanged: the file has become shorter.
            DataFileUnreadable: the disk does not give them.
        """
        size = self.dtype.itemsize
        wanted, start = count * size, begin * size
        parts: list[bytes] = []
        try:
            while wanted and (part := os.pread(self._file.fileno(), wanted, start)):
                parts.append(part)
                wanted, start = wanted - len(part), start + len(part)
        except OSError as error:
            raise DataFileUnreadable(path=str(self._data), reason=error.strerror or str(error)) from error
        if wanted:
            raise DataFileChanged(
                path=str(self._data), before=self._data_bytes, now=os.fstat(self._file.fileno()).st_size
            )
        return np.frombuffer(b"".join(parts), self.dtype)

    def all_tokens(self) -> Iterator[NDArray[Any]]:
        """Yield all tokens of ``.bin`` in their order, some millions at a time."""
        count = self._data_bytes // self.dtype.itemsize
        for begin in range(0, count, _TOKENS):
            yield self.tokens(begin, min(_TOKENS, count - begin))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return max(0, len(self.borders) - 1)

    def total_tokens(self) -> int:
        """Return the tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))


def write_documents(prefix: Path, dtype: np.dtype[Any], documents: Iterable[Sequence[NDArray[Any]]]) -> None:
    """Write ``.bin`` and ``.idx`` of documents, each of which has one or more sequences.

    Example::

        write_documents(Path("corpus"), np.dtype("<u2"), [[np.array([1, 2, 3])]])

    Raises:
        OverflowError: a token does not fit the type.
    """
    dtype = dtype.newbyteorder("<")
    lengths, borders = list[int](), [0]
    with replacing(bin_path(prefix)) as file:
        for document in documents:
            for tokens in document:
                stored = tokens.astype(dtype)
                if (stored != tokens).any():
                    raise OverflowError(f"a token of {tokens.max()} does not fit {dtype}")
                file.write(stored.tobytes())
                lengths.append(len(tokens))
            borders.append(len(lengths))
        write_index(idx_path(prefix), dtype, np.array(lengths, np.int32), np.array(borders, np.int64))


def write_index(path: Path, dtype: np.dtype[Any], lengths: NDArray[np.int32], borders: NDArray[np.int64]) -> None:
    """Write an ``.idx`` of sequences that follow each other in ``.bin`` without gaps.

    Args:
        path: the file, replaced whole.
        dtype: NumPy dtype of a token id.
        lengths: [sequences] tokens of each.
        borders: [documents + 1] first sequence of each document, and the number of sequences.
    """
    with replacing(path) as file:
        code = next(code for code, candidate in DTYPES.items() if candidate == dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(borders)))
        file.write(lengths.astype("<i4").tobytes())
        ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        file.write((ends - lengths * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        file.write(borders.astype("<i8").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Facts that the files do not contain themselves."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    tokenizer: str
    """The tokenizer as it was named."""
    fingerprint: str
    """Fingerprint of that tokenizer."""
    vocab_size: int
    eod_id: int | None
    """The token behind each document; None where none was put."""
    inputs: tuple[str, ...] = ()
    """The files that were read."""

    def text(self) -> str:
        """Return the JSON text that is written."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


_PROVENANCE = TypeAdapter(Provenance)


def provenance_path(prefix: Path) -> Path:
    """``P.nxdt.json``, a name that no file of text or of a tokenizer has."""
    return prefix.with_name(f"{prefix.name}.nxdt.json")


def read_provenance(prefix: Path) -> Provenance | None:
    """Return the note of a prefix; None where there is none, or where the file is of another program."""
    try:
        return _PROVENANCE.validate_json(read_text(provenance_path(prefix), follow=True), strict=True)
    except (OSError, ValueError):
        return None
