"""Directories of datasets and which of their files belong to a split; rows of Parquet, Arrow and JSONL files, in their
order, from any row on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from nxdt_core.data.cache import SAMPLED_FROM_BYTES, content_digests, digest, file_digest
from nxdt_core.data.files.compressed import COMPRESSED, UNREADABLE, opened
from nxdt_core.data.files.paths import JSON_LINES, WatchedFiles, expand, json_object, similar_files
from nxdt_core.data.files.tables import check_batch, check_stream, decoded, first_line, ipc_batches, parquet_batches
from nxdt_core.errors.data import BadJsonLine, DataFileNotFound, DataFileUnreadable
from nxdt_core.protocols.dataset import SplitName
from nxdt_core.system.regular_files import read_text, require_fetched
from nxdt_plugin_hf_data.errors import (
    DamagedDataset,
    EmptyData,
    NoDataset,
    SplitMissing,
    SplitUnclear,
    UnknownDataFormat,
)
from nxdt_plugin_hf_data.rows import chosen, is_tokenised

_KEYWORDS: Mapping[str, SplitName] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
_KEYWORD = re.compile(rf"(?<![^-._ 0-9])({'|'.join(_KEYWORDS)})(?![^-._ 0-9])")
"""A word of a name, between signs, digits and its ends."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"
Rows = tuple[int, pa.RecordBatch]
"""Number of the first row within its file, and the rows."""

_BATCH = 256
"""Rows that are read at once: enough for the threads of a tokenizer."""
_LINE_BYTES = 256 << 20
"""Limit for a line of JSON; a small compressed file can contain an extremely long one."""


_Reader = Callable[[Path, str, int], Iterator[Rows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A dataset on a disk."""

    path: str
    table: pa.Table
    """Mapped into memory, not read."""
    content: str
    """Digest of its files; of texts, whose tokens may be kept, every byte counts."""
    files: WatchedFiles


def is_saved(path: Path) -> bool:
    """Return whether the library has saved a dataset there."""
    return (path / _STATE).is_file() or (path / _SPLITS).is_file()


def open_saved(path: Path, *, key: str, split: SplitName, digests: Path | None = None) -> Saved:
    """Open the dataset at ``path``; if it has several splits, the one named ``split``. The directory ``digests`` keeps
    those of large files.

    Raises:
        DataFileNotFound: the path does not exist.
        NoDataset: the path is something else.
        SplitMissing: it has splits, but none with that name.
        EmptyData: it has no rows.
        DamagedDataset, DataFileUnreadable: its files cannot be read.
    """
    if not path.exists():
        raise DataFileNotFound(key=key, path=str(path), candidates=similar_files(path))
    if not is_saved(path):
        advice: dict[str, str] = {}
        if path.is_file():
            description, name = "it is a file", path.name
        else:
            inside = sorted(child.name for child in path.iterdir())
            if saved := [child for child in inside if is_saved(path / child)]:
                description = f"but {path / saved[0]} is"
                raise NoDataset(key=key, path=str(path), found=description, advice="Name that directory.")
            description = f"it holds {', '.join(inside[:3])}" if inside else "it is empty"
            name = next(iter(inside), "")
        if name.endswith((".parquet", ".arrow", *JSON_LINES, *COMPRESSED)):
            read = "Set data.streaming to true to read such files as they are"
            advice = {"advice": f"{read}, or save them with datasets' save_to_disk."}
        raise NoDataset(key=key, path=str(path), found=description, **advice)
    directory = _of_split(path, key, split)
    arrow = saved_files(directory, key=key, split=split)
    if not arrow:  # the library fails on a dataset without rows
        raise EmptyData(key=key, path=str(path))
    import datasets  # takes seconds, and only this function needs it

    try:
        for file in arrow:
            require_fetched(file)
            check_stream(file)
        dataset = datasets.load_from_disk(str(directory))
        files = [Path(file["filename"]) for file in dataset.cache_files]
        large = [file for file in files if file.stat().st_size > SAMPLED_FROM_BYTES]
        whole = [] if is_tokenised(dataset.data.table) else content_digests(large, digests)
        content = digest(*map(file_digest, files), *whole)
        watched = WatchedFiles(files, may_grow=True)
        return Saved(path=str(path), table=dataset.data.table, content=content, files=watched)
    except PermissionError as error:
        raise DataFileUnreadable(path=error.filename or str(path), reason=error.strerror or str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise DamagedDataset(path=str(path), reason=first_line(error)) from error


def saved_files(path: Path, *, key: str, split: SplitName) -> list[Path]:
    """Return the Arrow files of the dataset at ``path``, in their order.

    Raises:
        SplitMissing: it has splits, none of that name.
        DamagedDataset: what the library has noted of it cannot be read.
    """
    directory = _of_split(path, key, split)
    try:
        state = json.loads(read_text(directory / _STATE, follow=True))
        return [directory / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedDataset(path=str(directory / _STATE), reason=first_line(error)) from error


def _of_split(path: Path, key: str, split: SplitName) -> Path:
    if not (path / _SPLITS).is_file():
        return path
    names = tuple(sorted(child.name for child in path.iterdir() if (child / _STATE).is_file()))
    if split not in names:
        advice = f"Name the directory of one split, such as {path / (names or ('train',))[0]}."
        raise SplitMissing(key=key, path=str(path), wanted=split, splits=names, advice=advice)
    return path / split


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
        known = (file for file in sorted(path.rglob("*")) if file.is_file() and _reader(file) is not None)
        visible = (file for file in known if not any(part.startswith(".") for part in file.relative_to(path).parts))
        files = [file for file in visible if not _is_cache(file)]
        if not files:
            raise EmptyData(key=key, path=f"{path} has no files that end in {_KNOWN}, so it")
        names = [_splits(file.relative_to(path)) for file in files]
        if not any(splits - {split} for splits in names):  # none indicates another one
            return files
        for file, splits in zip(files, names, strict=True):
            if len(splits) != 1:
                raise SplitUnclear(key=key, path=str(path), file=str(file), splits=tuple(sorted(splits)))
        chosen_files = [file for file, splits in zip(files, names, strict=True) if split in splits]
        if not chosen_files:
            advice = f"To take files of any name, give a pattern such as {files[0].parent / '*'}."
            others = tuple(sorted(set[SplitName]().union(*names)))
            raise SplitMissing(key=key, path=str(path), wanted=split, splits=others, advice=advice)
        return chosen_files
    named = expand([path], key)
    found = [file for file in named if not _is_cache(file)] or named
    for file in found:
        if _reader(file) is None:
            raise UnknownDataFormat(key=key, path=str(file), known=_KNOWN)
    return found


def _splits(path: Path) -> set[SplitName]:
    """Return the splits that the directories of a file name, or else its own name."""
    directories = {_KEYWORDS[word] for part in path.parts[:-1] for word in _KEYWORD.findall(part)}
    return directories or {_KEYWORDS[word] for word in _KEYWORD.findall(path.name)}


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
        raise DamagedDataset(path=str(path), reason=first_line(error)) from error


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
                record = json_object(path, number, line, example=f'{{"{text_key}": "..."}}')
                rows.append({name: record[name] for name in chosen(tuple(record), text_key, f"{path}:{number}")})
            if len(rows) == _BATCH:
                yield seen - len(rows), _record_batch(path, number, rows)
                rows = []
    if rows:
        yield seen - len(rows), _record_batch(path, number, rows)


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


_READERS: Mapping[str, _Reader] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    **{f"{ending}{packed}": _json_lines for packed in ("", *COMPRESSED) for ending in JSON_LINES},
}
_KNOWN = ", ".join(_READERS)


def _reader(path: Path) -> _Reader | None:
    return next((reader for ending, reader in _READERS.items() if path.name.endswith(ending)), None)
