"""What the file-based tokenizers share: finding the library and the files, or saying what is missing."""

from __future__ import annotations

import difflib
import importlib
import re
from pathlib import Path
from typing import Any

from nxdt_core.errors.data import BadTokenizerFile, TokenizerFileNotFound, TokenizerLibraryMissing
from nxdt_core.regular_files import require_fetched

__all__ = ["holds_ranks", "import_library", "read_file"]

_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def import_library(package: str, *, tokenizer: str, extra: str) -> Any:
    """Import ``package`` and return it.

    Raises:
        TokenizerLibraryMissing: it cannot be imported; names the pip command of nxdt-core's ``extra``.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TokenizerLibraryMissing(tokenizer=tokenizer, package=package, extra=extra, reason=str(error)) from error


def read_file(path: Path, *, key: str, wanted: str) -> bytes:
    """Return the content of a tokenizer's file.

    Raises:
        TokenizerFileNotFound: there is none; ``wanted`` says of what kind it would be.
        BadTokenizerFile: it cannot be read, or is a Git LFS pointer.
    """
    if not path.is_file():
        names = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=3)
        candidates = tuple(str(path.parent / name) for name in near)
        raise TokenizerFileNotFound(key=key, path=str(path), wanted=wanted, candidates=candidates)
    try:
        require_fetched(path)
        return path.read_bytes()
    except OSError as error:
        raise BadTokenizerFile(path=str(path), wanted="readable file", reason=error.strerror or str(error)) from error


def holds_ranks(content: bytes) -> bool:
    """Return whether a file begins as those of tiktoken do: a token in base64, and its rank."""
    return _RANK.match(content) is not None
