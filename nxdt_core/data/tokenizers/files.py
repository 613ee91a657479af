"""Functions for all tokenizers: finding libraries and files, text as libraries accept it, and token positions."""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nxdt_core.data.files.paths import similar_files
from nxdt_core.errors.data import BadTokenizerFile, TokenizerFileNotFound, TokenizerLibraryMissing
from nxdt_core.protocols.tokenizer import LocatedIds
from nxdt_core.system.regular_files import require_fetched, require_inside

FAST_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
"""Beginning of a ``tokenizer_config.json``, for transformers 4 and 5. The class of 4 asks for token types otherwise."""
_LARGEST_BYTES = 256 << 20
"""Largest size of a file of a tokenizer: the largest that are published have a tenth of it."""
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")

T = TypeVar("T")


def import_library(package: str, *, tokenizer: str, extra: str) -> Any:
    """Import ``package`` and return it.

    Raises:
        TokenizerLibraryMissing: it cannot be imported; names the pip command of nxdt-core's ``extra``.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TokenizerLibraryMissing(tokenizer=tokenizer, package=package, extra=extra, reason=str(error)) from error


def read_file(path: Path, *, key: str, wanted: str, directory: Path | None = None) -> bytes:
    """Return the content of a tokenizer's file.

    Args:
        path: the file.
        key: key of the configuration that names it or its directory, for errors.
        wanted: what it would be, for errors.
        directory: from which a link may not lead out, where the user has named that and not the file.

    Raises:
        TokenizerFileNotFound: there is none.
        BadTokenizerFile: it cannot be read, is a Git LFS pointer, or has more than 256 MiB.
    """
    if not path.is_file():
        raise TokenizerFileNotFound(key=key, path=str(path), wanted=wanted, candidates=similar_files(path))
    try:
        if directory is not None:
            require_inside(path, directory)
        require_fetched(path)
        if path.stat().st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_LARGEST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise BadTokenizerFile(path=str(path), wanted="readable file", reason=error.strerror or str(error)) from error


def holds_ranks(content: bytes) -> bool:
    """Return whether a file begins as those of tiktoken do: a token in base64, and its rank."""
    return _RANK.match(content) is not None


def valid(text: str) -> str:
    """Return ``text`` with U+FFFD for each lone surrogate, which UTF-8 cannot express and most libraries refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encoded(encode: Callable[[list[str]], T], texts: Sequence[str]) -> T:
    """Return what ``encode`` of a library gives for ``texts``, made :func:`valid` only where it refuses them."""
    try:
        return encode(list(texts))
    except TypeError:
        return encode([*map(valid, texts)])


def located(text: str, ids: Sequence[int], widths: Sequence[int]) -> LocatedIds:
    """Return ``ids`` with the characters that their bytes belong to.

    Args:
        text: valid Unicode.
        ids: of all of it, in order.
        widths: bytes of each; together those of the text in UTF-8.
    """
    characters = np.repeat(np.arange(len(text), dtype=np.int64), [len(c.encode()) for c in text])
    behind = np.cumsum(widths, dtype=np.int64)
    starts = characters[behind - widths] if len(ids) else behind
    return LocatedIds(ids=np.array(ids, dtype=np.int64), starts=starts, ends=characters[behind - 1] + 1)
