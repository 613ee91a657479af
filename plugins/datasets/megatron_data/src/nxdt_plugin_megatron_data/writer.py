"""Writes ``.bin/.idx`` pairs, byte for byte as Megatron-Core does."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.regular_files import regular_opener, replacing
from nxdt_plugin_megatron_data.format import HEADER, MAGIC, VERSION, bin_path, code_of, idx_path

__all__ = ["IndexedWriter", "write_index"]


class IndexedWriter:
    """Appends documents; the files have their names once the block ends well, and are gone where it fails.

    Example::

        with IndexedWriter(Path("corpus"), np.dtype("<u2")) as writer:
            writer.add(np.array([1, 2, 3]))
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype.newbyteorder("<")
        self._lengths: list[int] = []
        self._borders = [0]
        self._part = bin_path(prefix).with_suffix(".bin.part")
        self._bin = open(self._part, "wb", opener=regular_opener)  # noqa: SIM115

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        if kind is not None:
            self._part.unlink()
            return
        lengths, borders = np.array(self._lengths, np.int32), np.array(self._borders, np.int64)
        write_index(idx_path(self._prefix), self._dtype, lengths, borders)
        self._part.rename(bin_path(self._prefix))

    def add(self, *sequences: NDArray[Any]) -> None:
        """Append a document of one or more sequences.

        Raises:
            OverflowError: a token does not fit the type.
        """
        for tokens in sequences:
            held = tokens.astype(self._dtype)
            if (held != tokens).any():
                raise OverflowError(f"a token of {tokens.max()} does not fit {self._dtype}")
            self._bin.write(held.tobytes())
            self._lengths.append(len(tokens))
        self._borders.append(len(self._lengths))


def write_index(path: Path, dtype: np.dtype[Any], lengths: NDArray[np.int32], borders: NDArray[np.int64]) -> None:
    """Write an ``.idx`` of sequences that follow each other in ``.bin`` without gaps.

    Args:
        path: the file, replaced whole.
        dtype: of a token.
        lengths: [sequences] tokens of each.
        borders: [documents + 1] first sequence of each document, and the number of sequences.
    """
    with replacing(path) as file:
        file.write(HEADER.pack(MAGIC, VERSION, code_of(dtype), len(lengths), len(borders)))
        file.write(lengths.astype("<i4").tobytes())
        ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        file.write((ends - lengths * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        file.write(borders.astype("<i8").tobytes())
