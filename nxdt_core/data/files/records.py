"""Raw records of files, each with its place; fields that no sample contains, and records that are left out."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from nxdt_core.data.cache import digest
from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import (
    JSON_LINES,
    PACKED,
    RecordFiles,
    check_utf8_start,
    decode,
    expand,
    json_object,
    lone_surrogate,
    parse_json,
    read_bytes,
    similar_files,
)
from nxdt_core.data.files.tables import ARROW, PARQUET, TEXT_TABLES, ArrowRows, text_rows
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.chats import FieldsUnused, TemplateMissing, TooManyBadRecords
from nxdt_core.errors.data import BadJsonFile, BadJsonLine, DataFileNotFound, NoRecords
from nxdt_core.protocols.dataset import DataReport, SplitName, TokenCount

_KINDS = ((ARROW,), (PARQUET,), JSON_LINES, (".json",), TEXT_TABLES)
"""Endings of the files of a directory; those of the first kind that it has are read."""
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Directories that ``DatasetDict.save_to_disk`` writes for a split."""
T = TypeVar("T")
_LISTED = 100
"""Bad records that are listed with their reasons; all are counted."""
_CHECKED_FROM = 1000
"""Records after which bad ones may stop a run before the last record."""


_Objects = Sequence[tuple[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """File and line of a record, for messages."""

    path: str
    number: int
    """Number from 1: the line of a JSONL file, the record of any other."""
    part: str = ""
    """Part of the record, such as ``prompt``; empty for all of it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}{f', {self.part}' if self.part else ''}"


Record = tuple[Place, dict[str, Any]]


class Records(Sequence[Record]):
    """Records of files, parsed each time that they are asked for: memory holds the bytes of the files.

    Args:
        files: paths, each with the numbered objects of the file.
        columns: key that a format names → key that the files have it under.
        chosen: places of the records among all; None chooses all.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, _Objects]],
        columns: Mapping[str, str],
        chosen: Sequence[int] | None = None,
    ) -> None:
        self._files, self._columns = files, columns
        self._ends = list(accumulate(len(objects) for _, objects in files))
        self._chosen = range(self._ends[-1] if self._ends else 0) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any, /) -> Any:
        if isinstance(index, slice):
            return self.take(self._chosen[index])
        at = self._chosen[index]
        file = bisect_right(self._ends, at)
        path, objects = self._files[file]
        number, record = objects[at - (self._ends[file - 1] if file else 0)]
        if columns := self._columns:
            renamed = {key: record[column] for key, column in columns.items() if column in record}
            record = {key: value for key, value in record.items() if key not in columns.values()} | renamed
        return Place(path=path, number=number), record

    def take(self, chosen: Sequence[int]) -> Records:
        """Return the records at these places among all."""
        return Records(self._files, self._columns, chosen)


class _Lines(Sequence[tuple[int, dict[str, Any]]]):
    """Objects of the lines of a JSONL file that are not blank, each with its number."""

    def __init__(self, path: Path, content: bytes, example: str) -> None:
        check_utf8_start(path, content)
        if content.startswith(tuple(PACKED)):
            decode(path, content)
        self._path, self._content, self._example = path, content, example
        self._places = array("q")
        number = begin = 0
        while begin < len(content):
            end = content.find(b"\n", begin)
            end = len(content) if end < 0 else end
            number += 1
            if content[begin:end].strip():
                self._places.extend((number, begin, end))
            begin = end + 1

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: Any, /) -> Any:
        number, begin, end = self._places[3 * index : 3 * index + 3]
        return number, json_object(self._path, number, self._content[begin:end], example=self._example)


def read_records(
    patterns: Iterable[Path],
    key: str,
    *,
    example: str = "",
    split: SplitName = "train",
    columns: Mapping[str, str] | None = None,
) -> tuple[Records, str]:
    """Return the records of all files, in order, and a digest of the files' content and of ``columns``.

    Args:
        patterns: paths and patterns; a directory stands for its files of one kind (Arrow, else Parquet, JSONL, JSON,
            CSV), and one that ``DatasetDict.save_to_disk`` wrote for those of ``split``.
        key: configuration key that names the file, for errors.
        example: a record as it is wanted, as JSON, for errors.
        split: of the run.
        columns: key that a format names → key that the files have it under.

    Raises:
        DataFileNotFound, DataFileUnreadable, TextNotUtf8, BadJsonFile, NoRecords, DataLibraryMissing,
        ArrowUnreadable: each names the file. A record that is asked for raises BadJsonLine, with its line.
    """
    files: list[tuple[str, _Objects]] = []
    digests: list[str] = []
    for path in expand((file for pattern in patterns for file in _within(pattern, key, split)), key):
        content = read_bytes(path)
        files.append((str(path), _opened(path, content, example)))
        if not files[-1][1]:
            raise NoRecords(path=str(path))
        digests.append(digest(content))
    return Records(files, columns or {}), digest(*digests, *([dict(columns)] if columns else []))


def _within(path: Path, key: str, split: SplitName) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        path = next((path / name for name in _SPLITS[split] if (path / name).is_dir()), path)
    inside = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith((".", "cache-"))]
    for endings in _KINDS:
        files = [entry for entry in inside if bare_name(entry).endswith(endings) and entry.is_file()]
        if files and not (path / "dataset_dict.json").is_file():
            return files
    candidates = tuple(str(entry) for entry in inside if entry.is_dir()) or similar_files(path)
    raise DataFileNotFound(key=key, path=str(path / "*.jsonl"), candidates=candidates)


def _opened(path: Path, content: bytes, example: str) -> _Objects:
    name = bare_name(path)
    if name.endswith((ARROW, PARQUET)):
        return ArrowRows(path, content)
    if name.endswith(TEXT_TABLES):
        return text_rows(path, content)
    if not content.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        return _Lines(path, content, example)
    text = decode(path, content)
    try:
        parsed = parse_json(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and (error.msg, error.lineno, error.colno) == ("Extra data", 2, 1):
            return _Lines(path, content, example)  # each line is a list, which is for the line's own error
        raise BadJsonFile(path=str(path), reason=str(error)) from error
    if not all(isinstance(record, dict) for record in parsed):
        raise BadJsonFile(path=str(path), reason="an entry is not an object")
    if half := lone_surrogate(text, parsed):
        raise BadJsonFile(path=str(path), reason=f"it holds half a character, {half}")
    return list(enumerate(parsed, start=1))


class UnusedFields:
    """Counts records by unused field.

    Args:
        mode: ``refuse`` raises an error at the first such record.
    """

    def __init__(self, mode: Literal["refuse", "report"]) -> None:
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
        unused = tuple(dict.fromkeys(names))
        if unused and self._mode == "refuse":
            raise FieldsUnused(place=str(place), names=unused)
        self._counts.update(unused)


class BadRecords:
    """Counts records that cannot be used, and lists the first ones with their places and reasons.

    Args:
        files: ``bad_records`` is ``refuse`` or ``drop``, and ``max_bad_share`` bounds what is dropped.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._drops_bad_records, self._share = files.bad_records == "drop", files.max_bad_share
        self._first: NxdtError | None = None
        self.count = 0
        self.reasons: list[str] = []

    def usable(self, records: Sequence[Record], make: Callable[[Record], T]) -> Iterator[T]:
        """Yield what ``make`` makes of each record, without those that cannot be read or for which it raises an error
        with a place.

        Raises:
            NxdtError: of a record that is refused.
            TooManyBadRecords: more are dropped than the configuration allows.
        """
        for number in range(len(records)):
            try:
                made = make(records[number])
            except NxdtError as error:
                if not self._drops_bad_records or not (
                    error.code == BadJsonLine.code or (hasattr(error, "place") and error.code != TemplateMissing.code)
                ):
                    raise
                self._first = self._first or error
                self.count += 1
                if self.count <= _LISTED:
                    self.reasons.append(f"{error.what()} ({error.code})")
            else:
                yield made
            seen = number + 1
            if self.count > self._share * seen and (seen == len(records) or seen >= _CHECKED_FROM):
                raise TooManyBadRecords(
                    bad=self.count, records=seen, share=self._share, first=tuple(self.reasons[:3])
                ) from self._first


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCounts:
    """What became of records: fields of :class:`DataReport`, which a cache keeps as an array of one JSON text."""

    truncated: int
    left_out: dict[str, int]
    bad: list[str]
    unused: dict[str, int]
    by_role: dict[str, TokenCount] = field(default_factory=dict)
    by_turn: list[TokenCount] = field(default_factory=list)

    def array(self) -> NDArray[np.str_]:
        """Return the array."""
        return np.array([_COUNTS.dump_json(self).decode()])

    @staticmethod
    def of(array: NDArray[np.str_]) -> RecordCounts:
        """Return the counts of an array.

        Raises:
            ValueError: it has something else.
        """
        return _COUNTS.validate_json(str(array[0]))

    def report(self, **further: Any) -> DataReport:
        """Return a report of these counts, with its other fields."""
        return DataReport(**{item.name: getattr(self, item.name) for item in fields(self)}, **further)


_COUNTS = TypeAdapter(RecordCounts)


def describe_unused(counts: Mapping[str, int]) -> str:
    """Return the counts as a phrase: ``history in 1,204 records, id in 1 record``."""
    return ", ".join(f"{name} in {count_records(count)}" for name, count in counts.items())


def count_records(count: int) -> str:
    """Return ``1 record`` or ``1,204 records``."""
    return f"{count:,} record{'' if count == 1 else 's'}"


def unread(record: Mapping[str, Any], read: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a record that hold something and are not among those that were ``read``."""
    readable = frozenset(read)
    return (key for key, value in record.items() if key not in readable and has_value(value))


def has_value(value: object) -> bool:
    """Return whether a value of a record holds something: null, blank texts, ``"[]"`` and empty lists do not."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    return value is not None and value not in ([], {})
