"""From files of JSON, Arrow or Parquet to raw records, each with its place, and fields that no sample contains."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.data.cache import digest
from nxdt_core.data.chat.templates import UnusedMode
from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import (
    EXPANDS_BY,
    EXPANDS_TO_BYTES,
    JSON_LINES,
    decode,
    expand,
    json_objects,
    lone_surrogate,
    read_bytes,
    similar_files,
)
from nxdt_core.errors.chats import FieldsUnused
from nxdt_core.errors.data import (
    ArrowUnreadable,
    BadJsonFile,
    DataFileNotFound,
    DataFileUnreadable,
    DataLibraryMissing,
    NoRecords,
)

__all__ = ["Place", "Record", "UnusedFields", "describe_unused", "is_given", "read_records", "unread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """File and line of a record, for messages."""

    path: str
    number: int
    """From 1: the line of a JSONL file, the record of any other."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


Record = tuple[Place, dict[str, Any]]

_ARROW, _PARQUET = ".arrow", ".parquet"
_KINDS = ((_ARROW,), (_PARQUET,), JSON_LINES)
"""Endings of the files of a directory; those of the first kind that it has are read."""
_BATCH = 1024


def read_records(patterns: Iterable[Path], key: str, *, example: str = "") -> tuple[list[Record], str]:
    """Return the records of all files, in order, and a digest of the files' content.

    Args:
        patterns: paths and patterns; a directory stands for its Arrow files, or else its Parquet or JSONL files.
        key: configuration key that names the file, for errors.
        example: a record as it is wanted, as JSON, for errors.

    Raises:
        DataFileNotFound, DataFileUnreadable, TextNotUtf8, BadJsonLine, BadJsonFile, NoRecords, DataLibraryMissing,
        ArrowUnreadable: each names the file, and the line where there are lines.
    """
    records: list[Record] = []
    digests: list[str] = []
    for path in expand((each for pattern in patterns for each in _within(pattern, key)), key):
        content = read_bytes(path)
        before = len(records)
        records.extend(
            (Place(path=str(path), number=number), record) for number, record in _records(path, content, example)
        )
        if len(records) == before:
            raise NoRecords(path=str(path))
        digests.append(digest(content))
    return records, digest(*digests)


def _within(path: Path, key: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = [each for each in sorted(path.iterdir()) if not each.name.startswith((".", "cache-"))]
    for endings in _KINDS:
        if found := [each for each in inside if bare_name(each).endswith(endings) and each.is_file()]:
            return found
    candidates = tuple(str(each) for each in inside if each.is_dir()) or similar_files(path)
    raise DataFileNotFound(key=key, path=str(path / "*.jsonl"), candidates=candidates)


def _records(path: Path, content: bytes, example: str) -> Iterator[tuple[int, dict[str, Any]]]:
    name = bare_name(path)
    if name.endswith((_ARROW, _PARQUET)):
        return enumerate(_table(path, content), start=1)
    if name.endswith((".csv", ".tsv")):
        reason = "it is a table of texts, and records are read from .jsonl, .json, .parquet and .arrow files"
        raise DataFileUnreadable(path=str(path), reason=reason)
    text = decode(path, content)
    if name.endswith(JSON_LINES) or not text.lstrip().startswith("["):
        return json_objects(path, text, example=example)
    return enumerate(_listed(path, text), start=1)


def _listed(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadJsonFile(path=str(path), reason=str(error)) from error
    if not all(isinstance(record, dict) for record in found):
        raise BadJsonFile(path=str(path), reason="an entry is not an object")
    if half := lone_surrogate(text, found):
        raise BadJsonFile(path=str(path), reason=f"it holds half a character, {half}")
    records: list[dict[str, Any]] = found
    return records


def _table(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Rows of an Arrow file, of the streaming form that ``datasets`` writes or the other, or of a Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataLibraryMissing(path=str(path), package="pyarrow", extra="arrow", reason=str(error)) from error
    buffer = pyarrow.py_buffer(content)
    try:
        if bare_name(path).endswith(_PARQUET):
            table = _parquet(buffer)
        elif content.startswith(b"ARROW1"):
            table = pyarrow.ipc.open_file(buffer).read_all()
        else:
            table = pyarrow.ipc.open_stream(buffer).read_all()
        table.validate(full=True)  # offsets of a damaged file lead anywhere
        rows: list[dict[str, Any]] = _values(table.to_pylist(), pyarrow.list_(pyarrow.struct(table.schema)))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ArrowUnreadable(path=str(path), reason=reason) from error
    return rows


def _parquet(buffer: Any) -> Any:
    """Return the table of a Parquet file, unless it holds a bomb: a page of a few bytes can stand for gigabytes.

    Raises:
        pyarrow.ArrowException: it is damaged, or expands without end.
    """
    import pyarrow
    import pyarrow.parquet

    most = max(EXPANDS_TO_BYTES, EXPANDS_BY * len(buffer))
    batches, found = [], 0
    with pyarrow.parquet.ParquetFile(pyarrow.BufferReader(buffer)) as file:
        for batch in file.iter_batches(_BATCH):
            found += batch.nbytes
            if found > most:
                raise pyarrow.ArrowInvalid(f"it expands to more than {EXPANDS_BY} times its size and {most >> 20} MiB")
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, file.schema_arrow)


def _values(value: Any, kind: Any) -> Any:
    """Return ``value`` of the Arrow type ``kind``, with the columns of JSON that ``datasets`` writes parsed.

    Objects lose the keys that hold nothing: Arrow gives each object the keys of all others. JSON keeps its nulls.
    """
    if isinstance(value, str) and getattr(kind, "extension_name", None) == "arrow.json":
        found = json.loads(value)
        if half := lone_surrogate(value, found):
            raise ValueError(f"its JSON holds half a character, {half}")
        return found
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if hasattr(kind, "get_field_index") else {}
        return {key: _values(each, kinds.get(key)) for key, each in value.items() if each is not None}
    return [_values(each, getattr(kind, "value_type", None)) for each in value] if isinstance(value, list) else value


class UnusedFields:
    """Counts records by unused field.

    Args:
        mode: ``refuse`` raises an error at the first such record.
    """

    def __init__(self, mode: UnusedMode) -> None:
        self._mode = mode
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """Field → records that have it, the most frequent first."""
        return dict(sorted(self._counts.items(), key=lambda item: (-item[1], item[0])))

    def add(self, place: Place, names: Iterable[str]) -> None:
        """Count the unused fields of one record.

        Raises:
            FieldsUnused: there are some, and they are refused.
        """
        found = tuple(dict.fromkeys(names))
        if found and self._mode == "refuse":
            raise FieldsUnused(place=str(place), names=found)
        self._counts.update(found)


def describe_unused(counts: Mapping[str, int]) -> str:
    """Return the counts as a phrase: ``history in 1,204 records, id in 1 record``."""
    return ", ".join(f"{name} in {count:,} record{'s' if count > 1 else ''}" for name, count in counts.items())


def unread(record: Mapping[str, Any], read: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a record that hold something and are not among those that were ``read``."""
    known = frozenset(read)
    return (key for key, value in record.items() if key not in known and is_given(value))


def is_given(value: object) -> bool:
    """Return whether a value of a record holds something: null, blank texts, ``"[]"`` and empty lists do not."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    return value is not None and value not in ([], {})
