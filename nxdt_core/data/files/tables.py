"""Files that are tables (Arrow, Parquet, CSV, TSV) → rows as JSON would have them."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import EXPANDS_BY, EXPANDS_TO_BYTES, decode, lone_surrogate, parse_json
from nxdt_core.errors.data import ArrowUnreadable, DataFileUnreadable, DataLibraryMissing

__all__ = ["ARROW", "PARQUET", "TEXT_TABLES", "ArrowRows", "text_rows"]

ARROW, PARQUET = ".arrow", ".parquet"
TEXT_TABLES = (".csv", ".tsv")
"""Endings of tables of texts, whose first row has the names of the columns."""

_BATCH = 1024
T = TypeVar("T")


class ArrowRows(Sequence[tuple[int, dict[str, Any]]]):
    """Rows of an Arrow file, of the streaming form that ``datasets`` writes or the other, or of a Parquet file.

    They become objects when they are asked for, and only the last batch of them is kept.

    Args:
        path: of the file.
        content: of it.

    Raises:
        DataLibraryMissing, ArrowUnreadable: names the path.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataLibraryMissing(path=str(path), package="pyarrow", extra="arrow", reason=str(error)) from error
        self._path = path
        buffer = pyarrow.py_buffer(content)

        def table() -> Any:
            if bare_name(path).endswith(PARQUET):
                found = _parquet(buffer)
            elif content.startswith(b"ARROW1"):
                found = pyarrow.ipc.open_file(buffer).read_all()
            else:
                found = pyarrow.ipc.open_stream(buffer).read_all()
            found.validate(full=True)  # offsets of a damaged file lead anywhere
            _check_names(found.column_names, ValueError)
            return found

        self._table = self._explained(table)
        self._kind = pyarrow.struct(self._table.schema)
        self._batch: tuple[int, list[dict[str, Any]]] = -1, []

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any, /) -> Any:
        number, within = divmod(index, _BATCH)
        if self._batch[0] != number:
            part = self._table.slice(number * _BATCH, _BATCH)
            self._batch = number, self._explained(lambda: [_values(row, self._kind) for row in part.to_pylist()])
        return index + 1, self._batch[1][within]

    def _explained(self, read: Callable[[], T]) -> T:
        import pyarrow

        try:
            return read()
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise ArrowUnreadable(path=str(self._path), reason=reason) from error


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
        found = parse_json(value)
        if half := lone_surrogate(value, found):
            raise ValueError(f"its JSON holds half a character, {half}")
        return found
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if hasattr(kind, "get_field_index") else {}
        return {key: _values(each, kinds.get(key)) for key, each in value.items() if each is not None}
    return [_values(each, getattr(kind, "value_type", None)) for each in value] if isinstance(value, list) else value


def _check_names(names: Sequence[str], error: type[Exception]) -> None:
    """Raise ``error`` where two columns have one name, unless they have none."""
    for number, name in enumerate(names, start=1):
        if name and (first := names.index(name) + 1) < number:
            raise error(f"columns {first} and {number} are both named {name!r}")


def text_rows(path: Path, content: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a CSV or TSV file, each with the number of its first line; all values are texts.

    Raises:
        TextNotUtf8, DataFileUnreadable: it is not UTF-8, two columns have one name, or a row has other columns than the
            first.
    """
    decode(path, content)
    lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter="\t" if bare_name(path).endswith(".tsv") else ",", strict=True)
    rows: list[tuple[int, dict[str, Any]]] = []
    begin, before = 1, csv.field_size_limit(sys.maxsize)  # the default refuses cells above 128 KiB
    try:
        names: list[str] = next(reader, [])
        _check_names(names, csv.Error)
        begin = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(names):
                raise csv.Error(f"{len(row)} columns, and the first line names {len(names)}")
            if row:
                rows.append((begin, dict(zip(names, row, strict=True))))
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataFileUnreadable(path=str(path), reason=f"line {begin}: {error}") from error
    finally:
        csv.field_size_limit(before)
    return rows
