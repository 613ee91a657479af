"""From patterns to files and from files to documents, with every way in which that goes wrong named."""

from __future__ import annotations

import difflib
import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nxdt_core.config.paths import PackageNotFound, resolve_path
from nxdt_core.errors import (
    BadJsonLine,
    DataFileNotFound,
    DataFileUnreadable,
    EmptyTextFile,
    JsonTextMissing,
    TextNotUtf8,
)

__all__ = ["documents", "expand", "read_bytes"]

_JSON_LINES = (".jsonl", ".ndjson")
_BOM = "\ufeff"


def expand(patterns: Iterable[Path | str], key: str) -> list[Path]:
    """Files that ``patterns`` name, in their order, the matches of each sorted by name.

    Raises:
        DataFileNotFound: a path or pattern matches no file; names what lies nearby.
    """
    files: list[Path] = []
    for pattern in patterns:
        try:
            path = resolve_path(pattern)
        except PackageNotFound as error:
            raise DataFileNotFound(key=key, path=str(pattern)) from error
        found = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        found = [p for p in found if p.is_file()]
        if not found:
            raise DataFileNotFound(key=key, path=str(pattern), candidates=_near(path))
        files += found
    return files


def _near(path: Path) -> tuple[str, ...]:
    """Files with a similar name beside ``path``, or those in it where it is a directory."""
    if path.is_dir():
        return tuple(sorted(str(path / p.name) for p in path.iterdir() if p.is_file()))
    if not path.parent.is_dir():
        return ()
    names = sorted(p.name for p in path.parent.iterdir())
    return tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3))


def read_bytes(path: Path) -> bytes:
    """Content of a file, decompressed where its name ends in ``.gz``.

    Raises:
        DataFileUnreadable: no permission, an error of the disk, or damaged compressed data.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFileUnreadable(path=str(path), reason=reason) from error


def documents(path: Path, content: bytes, *, text_key: str, separator: str | None) -> Iterator[str]:
    """Documents of one file, none of them blank.

    Args:
        path: names the file in errors; its suffix tells the format.
        content: what :func:`read_bytes` gave.
        text_key: key of the text in JSONL.
        separator: between documents of plain text; None for one document.

    Raises:
        EmptyTextFile, TextNotUtf8, BadJsonLine, JsonTextMissing: as they say.
    """
    empty = True
    name = path.name.removesuffix(".gz")
    text = _decode(path, content)
    texts = _json_texts(path, text, text_key) if name.endswith(_JSON_LINES) else _split(text, separator)
    for document in texts:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise EmptyTextFile(path=str(path))


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise TextNotUtf8(path=str(path), position=error.start, line=line, byte=byte) from error


def _split(text: str, separator: str | None) -> list[str]:
    return [text] if separator is None else text.split(separator)


def _json_texts(path: Path, text: str, key: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold U+2028
        if line.strip():
            yield _json_text(path, number, line, key)


def _json_text(path: Path, number: int, line: str, key: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadJsonLine(path=str(path), line=number, reason=str(error)) from error
    if not isinstance(record, dict):
        raise BadJsonLine(path=str(path), line=number, reason=f"it is a {type(record).__name__}")
    value = record.get(key)
    if not isinstance(value, str):
        keys = ", ".join(repr(k) for k in record) or "none"
        found = f"its keys are {keys}" if key not in record else f"its value is a {type(value).__name__}"
        raise JsonTextMissing(path=str(path), line=number, key=key, found=found)
    return value
