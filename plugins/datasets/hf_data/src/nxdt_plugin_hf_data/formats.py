"""Rows of Parquet, Arrow and JSONL files, in their order, from any row on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from nxdt_core.data.files.compressed import COMPRESSED, UNREADABLE, opened
from nxdt_core.data.files.paths import JSON_LINES, WatchedFiles, expand, json_object
from nxdt_core.data.files.tables import check_batch, decoded, ipc_batches, parquet_batches
from nxdt_core.errors.data import BadJsonLine, DataFileUnreadable
from nxdt_core.protocols.dataset import SplitName
from nxdt_core.system.regular_files import require_fetched
from nxdt_plugin_hf_data.columns import chosen
from nxdt_plugin_hf_data.directories import is_saved, of_split, saved_files
from nxdt_plugin_hf_data.errors import DamagedDataset, EmptyData, UnknownDataFormat

Rows = tuple[int, pa.RecordBatch]
"""Number of the first row within its file, and the rows."""

_BATCH = 256
"""Rows that are read at once: enough for the threads of a tokenizer."""


_LINE_BYTES = 256 << 20
"""Limit for a line of JSON; a small compressed file can contain an extremely long one."""


def files_of(path: Path, key: str, split: SplitName) -> list[Path]:
    """Return the files that ``path`` names, in the order in which they are read.

    Args:
        path: a directory saved by datasets, a directory of files (read in order of their names), a file, or a
            pattern. Directories and patterns exclude hidden files and cache files of datasets.
        key: key of the configuration, for errors.
        split: the split to read if a directory has several.

    Raises:
        DataFileNotFound: the path does not exist, or no file matches.
        EmptyData: a directory has no files of a known format.
        UnknownDataFormat: a file has no known format.
        SplitMissing: the directory has splits, but none with that name.
        SplitUnclear: it has files of several splits, and the split of one file cannot be determined.
    """
    if is_saved(path):
        return saved_files(path, key=key, split=split)
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file() and _reader(file) is not None)
        found = [file for file in files if not _is_aside(file.relative_to(path))]
        if not found:
            raise EmptyData(key=key, path=f"{path} has no files that end in {_KNOWN}, so it")
        return of_split(found, path, key=key, split=split)
    named = expand([path], key)
    found = [file for file in named if not _is_cache(file)] or named
    for file in found:
        if _reader(file) is None:
            raise UnknownDataFormat(key=key, path=str(file), known=_KNOWN)
    return found


def _is_aside(inside: Path) -> bool:
    """Return whether a file of a directory is hidden, or a cache of datasets."""
    return _is_cache(inside) or any(part.startswith(".") for part in inside.parts)


def _is_cache(path: Path) -> bool:
    """Return whether datasets wrote a file to cache results, such as those of ``map``."""
    return path.name.startswith("cache-") and path.suffix == ".arrow"


def read_rows(path: Path, text_key: str, start: int = 0) -> Iterator[Rows]:
    """Yield the rows of a file from ``start`` on, up to 256 at a time, and of their columns those that :func:`chosen`
    says.

    Raises:
        ColumnMissing: it has neither tokens nor text.
        DamagedDataset, DataFileUnreadable, BadJsonLine: of the file.
    """
    reader = _reader(path)
    assert reader is not None
    watched = WatchedFiles([path], may_grow=False)
    try:
        require_fetched(path)
        size = path.stat().st_size
        for first, batch in reader(path, text_key, start):
            for begin in range(0, batch.num_rows, _BATCH):
                watched.check()
                part = batch.slice(begin, _BATCH)
                check_batch(part, size)
                yield first + begin, part
        watched.check()
    except PermissionError as error:
        raise DataFileUnreadable(path=str(path), reason=error.strerror or str(error)) from error
    except (pa.ArrowException, UnicodeDecodeError, MemoryError, *UNREADABLE) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DamagedDataset(path=str(path), reason=reason) from error


def _parquet(path: Path, text_key: str, start: int) -> Iterator[Rows]:
    schema, first, batches = parquet_batches(path, _BATCH, lambda names: chosen(names, text_key, str(path)), start)
    size = path.stat().st_size

    def plain() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            check_batch(batch, size)
            yield decoded(batch, schema)

    yield from _from(start, first, plain())


def _arrow(path: Path, text_key: str, start: int) -> Iterator[Rows]:
    # Not mapped: a file that is truncated would kill the process.
    _, batches = ipc_batches(lambda: pa.OSFile(str(path)))
    yield from _from(start, 0, (batch.select(chosen(batch.schema.names, text_key, str(path))) for batch in batches))


def _json_lines(path: Path, text_key: str, start: int) -> Iterator[Rows]:
    rows: list[Mapping[str, object]] = []
    seen = number = 0
    with opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
            if len(line) == _LINE_BYTES:
                raise BadJsonLine(path=str(path), line=number, reason=f"it is longer than {_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            seen += 1
            if seen > start:
                rows.append(_json_row(path, number, line, text_key))
            if len(rows) == _BATCH:
                yield seen - len(rows), _record_batch(path, number, rows)
                rows = []
    if rows:
        yield seen - len(rows), _record_batch(path, number, rows)


def _json_row(path: Path, number: int, line: bytes, text_key: str) -> Mapping[str, object]:
    record = json_object(path, number, line, example=f'{{"{text_key}": "..."}}')
    return {name: record[name] for name in chosen(tuple(record), text_key, f"{path}:{number}")}


def _record_batch(path: Path, number: int, rows: list[Mapping[str, object]]) -> pa.RecordBatch:
    try:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pa.RecordBatch.from_pydict({name: [row.get(name) for row in rows] for name in names})
    except pa.ArrowException as error:
        reason = f"a value of the lines before it or its own has another type than the rest ({error})"
        raise BadJsonLine(path=str(path), line=number, reason=reason) from error


def _from(start: int, first: int, batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
    """Number the batches, the first of which begins at row ``first``, and skip rows before ``start``."""
    for batch in batches:
        skipped = min(max(start - first, 0), batch.num_rows)
        if skipped < batch.num_rows:
            yield first + skipped, batch.slice(skipped)
        first += batch.num_rows


_Reader = Callable[[Path, str, int], Iterator[Rows]]
_READERS: Mapping[str, _Reader] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    **{f"{ending}{packed}": _json_lines for packed in ("", *COMPRESSED) for ending in JSON_LINES},
}
_KNOWN = ", ".join(_READERS)


def _reader(path: Path) -> _Reader | None:
    return next((reader for ending, reader in _READERS.items() if path.name.endswith(ending)), None)
