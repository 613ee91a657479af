"""Files that are tables (Arrow, Parquet, CSV, TSV) → rows as JSON would have them."""

from __future__ import annotations

import csv
import io
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import EXPANDS_BY, EXPANDS_TO_BYTES, decode, lone_surrogate, parse_json
from nxdt_core.errors.data import ArrowUnreadable, DataFileUnreadable, DataLibraryMissing

ARROW, PARQUET = ".arrow", ".parquet"
TEXT_TABLES = (".csv", ".tsv")
"""Endings of tables of texts, whose first row has the names of the columns."""

_BATCH = 1024
_REPEATING = 7
"""Parquet's number of ``DELTA_BYTE_ARRAY``: a value of a byte can be the one before it."""
T = TypeVar("T")
ChosenColumns = Callable[[Sequence[str]], Sequence[str]] | None

_TOO_LARGE = f"it expands to more than {EXPANDS_BY} times its size and {EXPANDS_TO_BYTES >> 20} MiB"
_VALUE_BYTES = 8
"""Bytes that a value counts at least: rows without a byte, such as nulls, take time and an index."""


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
            is_parquet = bare_name(path).endswith(PARQUET)
            if is_parquet:
                schema, _, batches = parquet_batches(buffer, _BATCH)
            else:
                schema, batches = ipc_batches(lambda: pyarrow.BufferReader(buffer))
            _check_names(schema.names, ValueError)
            most, expanded, plain = _most(len(content)), 0, []
            for batch in batches:
                expanded += _expanded(batch)
                if expanded > most:
                    raise pyarrow.ArrowInvalid(_TOO_LARGE)
                plain.append(batch if not is_parquet else decoded(batch, schema))
            return pyarrow.Table.from_batches(plain, schema)

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
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
            raise ArrowUnreadable(path=str(self._path), reason=first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what another library says, without its full stop, or the error's class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _most(size_bytes: int) -> int:
    return max(EXPANDS_TO_BYTES, EXPANDS_BY * size_bytes)


def parquet_batches(
    source: Any, rows: int, columns: ChosenColumns = None, start: int = 0
) -> tuple[Any, int, Iterator[Any]]:
    """Return the schema of a Parquet file, the number of the first row that is read, and batches of ``rows`` rows.

    Texts are dictionaries where the file has one: a page of a few bytes can stand for gigabytes. :func:`decoded` makes
    texts of them.

    Args:
        source: a path or a buffer.
        rows: of a batch.
        columns: of the file's, those that are read; None takes all.
        start: first row that is wanted; row groups before it are not read, and the first batch begins with the group.

    Raises:
        pyarrow.ArrowException: it is damaged, or a row group expands without end; also while batches are read.
    """
    import pyarrow
    import pyarrow.parquet

    plain, content = pyarrow.parquet.ParquetFile(source), pyarrow.input_stream(source, compression=None)
    metadata, leaves = plain.metadata, [plain.schema.column(number) for number in range(len(plain.schema))]
    most, numbers = _most(content.size()), [*range(metadata.num_row_groups)]
    ends = [*accumulate(metadata.row_group(number).num_rows for number in numbers)]
    wanted = [number for number in numbers if ends[number] > start]
    names = None if columns is None else columns(plain.schema_arrow.names)

    def batches() -> Iterator[Any]:
        for number in wanted:
            texts, expanded, longest = set(), 0, 0
            for place, leaf in enumerate(leaves):
                largest, repeats = 0, False
                value_bytes = max(_VALUE_BYTES, leaf.length)  # of one that a dictionary may have once
                for size, values, encodings in _pages(content, metadata.row_group(number).column(place)):
                    expanded += max(0, size, value_bytes * values)
                    largest, repeats = max(largest, size), repeats or _REPEATING in encodings
                    if expanded > most:
                        raise pyarrow.ArrowInvalid(_TOO_LARGE)
                if repeats:
                    longest = max(longest, largest)
                elif leaf.physical_type == "BYTE_ARRAY":
                    texts.add(leaf.path)
            file = pyarrow.parquet.ParquetFile(source, metadata=metadata, read_dictionary=sorted(texts))
            count = min(rows, max(1, most // 2 // longest)) if longest else rows
            yield from file.iter_batches(count, row_groups=[number], columns=names)

    return plain.schema_arrow, ends[wanted[0] - 1] if wanted and wanted[0] else 0, batches()


def _pages(content: Any, chunk: Any) -> Iterator[tuple[int, int, set[Any]]]:
    """Yield the bytes, the number of values and the encodings of each page of a Parquet column chunk, as the page
    declares them, which its reader allocates. What the file declares of the chunk may be less.

    Raises:
        pyarrow.ArrowInvalid: a header is damaged.
    """
    import pyarrow

    place, values = chunk.data_page_offset, 0
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < place:
        place = chunk.dictionary_page_offset
    end = place + chunk.total_compressed_size
    while place < end and values < chunk.num_values:
        content.seek(place)
        try:
            header = _thrift(content, levels=2)  # PageHeader in parquet.thrift
            first, second = header.get(5, {}), header.get(8, {})
            count = first.get(1, 0) + second.get(1, 0)
            size, place = header[2], content.tell() + max(0, header[3])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise pyarrow.ArrowInvalid(f"the header of a page at byte {place} is damaged") from error
        yield size, count, {first.get(2), second.get(4)}
        values += count


def _thrift(content: Any, levels: int) -> dict[int, Any]:
    """Return the numbers and structs of a struct in Thrift's compact protocol, by field; ``levels`` bounds nesting.

    Raises:
        ValueError: it ends early, or has types that the header of a page has not.
    """

    def varint() -> int:
        value = 0
        for shift in range(0, 64, 7):
            (byte,) = content.read(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return int(value)
        raise ValueError("a number of a page header has no end")

    fields: dict[int, Any] = {}
    number = 0
    while (head := content.read(1)) != b"\0":
        (byte,) = head
        number = number + (byte >> 4) if byte >> 4 else varint() >> 1
        match byte & 15:
            case 1 | 2:  # true and false
                pass
            case 3:
                content.read(1)
            case 4 | 5 | 6:
                value = varint()
                fields[number] = (value >> 1) ^ -(value & 1)
            case 8:
                content.read(varint())
            case 12 if levels:
                fields[number] = _thrift(content, levels - 1)
            case kind:
                raise ValueError(f"a page header has a field of type {kind}")
    return fields


def ipc_batches(open_source: Callable[[], Any]) -> tuple[Any, Iterator[Any]]:
    """Return the schema of an Arrow stream or file, and its batches, each of which is refused before its buffers are
    decompressed where it is larger than any of a file of this size.

    A file is read as the stream that it holds, without the places in its footer, which need not be those of batches.

    Raises:
        pyarrow.ArrowException: it is damaged, or has columns that can repeat a value without end; also while batches
            are read.
    """
    import pyarrow

    source, ahead = open_source(), open_source()
    most, named = _most(source.size()), None
    if source.read(6) == b"ARROW1":
        named = pyarrow.ipc.open_file(source).num_record_batches
        source.seek(8)
        ahead.seek(8)
    else:
        source.seek(0)
    reader, messages = pyarrow.ipc.open_stream(source), pyarrow.ipc.MessageReader.open_stream(ahead)
    for field in reader.schema:
        _check_kind(field.type)

    def batches() -> Iterator[Any]:
        read = 0
        for message in messages:
            if message.type != "schema" and _uncompressed(message) > most:
                raise pyarrow.ArrowInvalid(_TOO_LARGE)
            if message.type == "record batch":
                read += 1
                yield reader.read_next_batch()
        if named not in (None, read):
            raise pyarrow.ArrowInvalid(f"its footer names {named} batches, and {read} are before it")

    return reader.schema, batches()


def check_stream(path: Path) -> None:
    """Check that all batches of an Arrow stream together are no larger than a file of this size may be, without reading
    their values.

    Raises:
        pyarrow.ArrowException: they are, or the stream is damaged.
    """
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        messages = pyarrow.ipc.MessageReader.open_stream(source)
        if sum(_uncompressed(message) for message in messages if message.type != "schema") > _most(source.size()):
            raise pyarrow.ArrowInvalid(_TOO_LARGE)


def _uncompressed(message: Any) -> int:
    """Return the bytes that a batch of an Arrow stream has, as its buffers declare them; pyarrow verifies the offsets
    of its flatbuffer, ``Message`` in Arrow's ``format/Message.fbs``."""
    data, body = memoryview(message.metadata), memoryview(message.body)

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number) if 4 + 2 * number < size else (0,)
        return table + offset if offset else 0

    def target(place: int) -> int:
        return place + int(struct.unpack_from("<I", data, place)[0])

    batch = target(field(target(0), 2))
    if message.type == "dictionary":
        batch = target(field(batch, 1))
    if not field(batch, 3):  # compression
        return len(body)
    buffers, total = target(field(batch, 2)), 0
    for number in range(struct.unpack_from("<I", data, buffers)[0]):
        offset, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        declared = int.from_bytes(body[offset : offset + 8], "little", signed=True) if length else 0
        total += length if declared < 0 else declared
    return total


def decoded(batch: Any, schema: Any) -> Any:
    """Return a batch of :func:`parquet_batches` with the types of the file, once its size is known to be small."""
    import pyarrow

    fields = [schema.field(name) for name in batch.schema.names]
    return batch.cast(pyarrow.schema(fields, schema.metadata))


def check_batch(batch: Any, size_bytes: int) -> None:
    """Check that the values of a batch take no more memory than a file of this size may.

    Raises:
        pyarrow.ArrowException: they do, or offsets of it lead anywhere.
    """
    import pyarrow

    if _expanded(batch) > _most(size_bytes):
        raise pyarrow.ArrowInvalid(_TOO_LARGE)


def _check_kind(kind: Any) -> None:
    """Refuse columns in which a few bytes stand for any number of values, other than dictionaries."""
    import pyarrow
    from pyarrow import types

    refused = (types.is_run_end_encoded, types.is_union, types.is_list_view, types.is_large_list_view)
    if any(is_refused(kind) for is_refused in refused):
        raise pyarrow.ArrowInvalid(f"it has a column of {kind}, which is not read; write it as a plain one")
    inner = getattr(kind, "storage_type", None) or (kind.value_type if types.is_dictionary(kind) else None)
    for inner_kind in [inner] if inner is not None else [kind.field(number).type for number in range(kind.num_fields)]:
        _check_kind(inner_kind)


def _expanded(array: Any) -> int:
    """Return the bytes of all values of a batch or an array, those of a dictionary as often as they are used."""
    import pyarrow
    import pyarrow.compute
    from pyarrow import types

    if isinstance(array, pyarrow.RecordBatch):
        array.validate(full=True)  # offsets of a damaged file lead anywhere
        return _VALUE_BYTES * len(array) + sum(map(_expanded, array.columns))
    if isinstance(array, pyarrow.ExtensionArray):
        return _expanded(array.storage)
    kind, base = array.type, _VALUE_BYTES * len(array)
    if types.is_dictionary(kind):
        values = array.dictionary
        of_texts = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
        if any(is_text(kind.value_type) for is_text in of_texts):
            lengths = pyarrow.compute.binary_length(values).take(array.indices)
            return base + int(pyarrow.compute.sum(lengths).as_py() or 0)
        return base + len(array) * _expanded(values)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], "<i4")[::4] if len(array) else np.empty(0, "<i4")
        return base + int(views[array.offset : array.offset + len(array)].sum(dtype=np.int64))
    if types.is_nested(kind):
        inner = [array.keys, array.items] if types.is_map(kind) else array.flatten()
        return base + sum(map(_expanded, inner if isinstance(inner, list) else [inner]))
    return max(base, int(array.nbytes))


def _values(value: Any, kind: Any) -> Any:
    """Return ``value`` of the Arrow type ``kind``, with the columns of JSON that ``datasets`` writes parsed.

    Objects lose the keys that hold nothing: Arrow gives each object the keys of all others. JSON keeps its nulls.
    """
    if isinstance(value, str) and getattr(kind, "extension_name", None) == "arrow.json":
        parsed = parse_json(value)
        if half := lone_surrogate(value, parsed):
            raise ValueError(f"its JSON holds half a character, {half}")
        return parsed
    kind = getattr(kind, "storage_type", kind)
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind} if hasattr(kind, "get_field_index") else {}
        return {key: _values(item, kinds.get(key)) for key, item in value.items() if item is not None}
    return [_values(item, getattr(kind, "value_type", None)) for item in value] if isinstance(value, list) else value


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
