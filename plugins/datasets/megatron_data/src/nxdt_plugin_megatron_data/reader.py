"""Reads ``.bin/.idx`` pairs through memory maps; both are checked whole when they are opened."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_plugin_megatron_data.errors import BadIndexFile, DataShorterThanIndex, IndexedFileMissing
from nxdt_plugin_megatron_data.format import DTYPES, HEADER, MAGIC, VERSION, bin_path, idx_path

__all__ = ["IndexedTokens"]


class IndexedTokens:
    """The sequences of one prefix. The arrays are views of the mapped files: none is read before it is used.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        key: what named it, for errors.

    Raises:
        IndexedFileMissing: one of the two files is not there.
        BadIndexFile: the index is damaged, cut off, or of another format.
        DataShorterThanIndex: the tokens end too early.
    """

    def __init__(self, prefix: Path, key: str = "data.data_prefix") -> None:
        self.prefix = prefix
        index, data = idx_path(prefix), bin_path(prefix)
        for path in (index, data):
            if not path.is_file():
                raise IndexedFileMissing(key=key, path=str(path), candidates=_near(prefix))
        raw = _mapped(index)
        if len(raw) < HEADER.size or raw[: len(MAGIC)].tobytes() != MAGIC:
            raise BadIndexFile(path=str(index), reason=f"it does not begin with {MAGIC!r}")
        _, version, code, sequences, borders = HEADER.unpack(raw[: HEADER.size].tobytes())
        if version != VERSION or code not in DTYPES or DTYPES[code].kind not in "iu":
            raise BadIndexFile(path=str(index), reason=f"version {version} with the type {code} of tokens is unknown")
        sizes = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * borders]).tolist()
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
        if reason := self._contradiction():
            raise BadIndexFile(path=str(index), reason=reason)
        found, needed = data.stat().st_size, self._bytes_needed()
        if found < needed:
            raise DataShorterThanIndex(path=str(data), found=found, needed=needed)
        self.tokens: NDArray[Any] = _mapped(data)[: found - found % self.dtype.itemsize].view(self.dtype)
        """All tokens of ``.bin``."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int, /) -> NDArray[Any]:
        begin = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.lengths[sequence])]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return max(0, len(self.borders) - 1)

    def total_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def _contradiction(self) -> str:
        """What in the arrays cannot be, or nothing."""
        if len(self.borders) and (self.borders[0] != 0 or self.borders[-1] != len(self)):
            return f"its documents end at sequence {self.borders[-1]} of {len(self)}"
        if (np.diff(self.borders) < 0).any():
            return "its document borders do not ascend"
        if len(self) and (self.lengths.min() < 0 or self.pointers.min() < 0):
            return "it holds a negative length or place"
        if (self.pointers % self.dtype.itemsize).any():
            return f"a sequence begins within a token of {self.dtype.itemsize} bytes"
        return ""

    def _bytes_needed(self) -> int:
        if not len(self):
            return 0
        ends = self.pointers.view("<u8") + self.lengths.astype("<u8") * np.uint64(self.dtype.itemsize)
        return int(ends.max())  # unsigned, since a damaged place may lie just below the end of what int64 holds


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file. (An empty file cannot be mapped.)"""
    if os.path.getsize(path) == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _near(prefix: Path) -> tuple[str, ...]:
    """Prefixes in the same directory whose names look alike."""
    if not prefix.parent.is_dir():
        return ()
    names = sorted(path.stem for path in prefix.parent.glob("*.idx"))
    close = difflib.get_close_matches(prefix.name, names, n=3, cutoff=0.5)
    return tuple(str(prefix.parent / name) for name in close)
