"""The layout of Megatron-Core's ``.idx`` and ``.bin`` files (``megatron/core/datasets/indexed_dataset.py``).

All numbers are little-endian. ``.idx`` is a header and three arrays, with a fourth in multimodal files::

    magic 9 bytes · version uint64 = 1 · dtype uint8 · sequences uint64 · document borders uint64
    lengths int32 [sequences] · pointers int64 [sequences] · borders int64 [document borders] · (modes int8 [sequences])

``.bin`` is nothing but tokens. A pointer is the byte in it at which a sequence begins. Sequence ``borders[i]`` is the
first of document i; the last border is the number of sequences. A text that was not split into sentences is one
sequence, and Megatron's GPT data sets know sequences only: what they call a document is one.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

__all__ = ["DTYPES", "HEADER", "MAGIC", "VERSION", "bin_path", "code_of", "dtype_for", "idx_path"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""magic, version, code of the dtype, number of sequences, number of borders"""

DTYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
"""By the code that a header carries."""

_UINT16_BELOW = 65500
"""Vocabularies that Megatron-Core's preprocessing stores as uint16."""


def dtype_for(vocab_size: int) -> np.dtype[np.generic]:
    """Return the type of tokens that Megatron-Core's preprocessing takes for a vocabulary."""
    return np.dtype("<u2") if vocab_size < _UINT16_BELOW else np.dtype("<i4")


def code_of(dtype: np.dtype[np.generic]) -> int:
    """Return the code of a type.

    Raises:
        KeyError: the format has none for it.
    """
    return {known: code for code, known in DTYPES.items()}[dtype.newbyteorder("<")]


def idx_path(prefix: Path) -> Path:
    """``P.idx``; a prefix may hold dots."""
    return prefix.with_name(f"{prefix.name}.idx")


def bin_path(prefix: Path) -> Path:
    """``P.bin``"""
    return prefix.with_name(f"{prefix.name}.bin")
