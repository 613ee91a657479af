"""Directories of datasets: which files belong to which split."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from nxdt_core.data.cache import SAMPLED_FROM_BYTES, content_digests, digest, file_digest
from nxdt_core.data.files.compressed import COMPRESSED
from nxdt_core.data.files.paths import JSON_LINES, WatchedFiles, similar_files
from nxdt_core.data.files.tables import check_stream
from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import DataFileNotFound, DataFileUnreadable
from nxdt_core.protocols.dataset import SplitName
from nxdt_core.system.regular_files import read_text, require_fetched
from nxdt_plugin_hf_data.columns import is_tokenised
from nxdt_plugin_hf_data.errors import DamagedDataset, EmptyData, NoDataset, SplitMissing, SplitUnclear

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


def of_split(files: Sequence[Path], directory: Path, *, key: str, split: SplitName) -> list[Path]:
    """Return the files of a split; all, where no name indicates another one.

    Args:
        files: at any depth of the directory.
        directory: whose own name says nothing.
        key: configuration key that names the file, for errors.
        split: which to take.

    Raises:
        SplitMissing: the names speak of other splits only.
        SplitUnclear: some speak of another split, and one of none or of several.
    """
    spoken = [_splits(file.relative_to(directory)) for file in files]
    if not any(splits - {split} for splits in spoken):
        return list(files)
    for file, splits in zip(files, spoken, strict=True):
        if len(splits) != 1:
            raise SplitUnclear(key=key, path=str(directory), file=str(file), splits=tuple(sorted(splits)))
    found = [file for file, splits in zip(files, spoken, strict=True) if split in splits]
    if not found:
        names = tuple(sorted(set[SplitName]().union(*spoken)))
        advice = f"To take files of any name, give a pattern such as {files[0].parent / '*'}."
        raise SplitMissing(key=key, path=str(directory), wanted=split, splits=names, advice=advice)
    return found


def _splits(path: Path) -> set[SplitName]:
    """Return the splits that the directories of a file name, or else its own name."""
    directories = {_KEYWORDS[word] for part in path.parts[:-1] for word in _KEYWORD.findall(part)}
    return directories or {_KEYWORDS[word] for word in _KEYWORD.findall(path.name)}


_STATE, _SPLITS = "state.json", "dataset_dict.json"


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
        raise _other(path, key)
    directory = _of_split(path, key, split)
    arrow = saved_files(directory, key=key, split=split)
    if not arrow:  # the library fails on a dataset without rows
        raise EmptyData(key=key, path=str(path))
    import datasets  # takes seconds, and only this function needs it

    try:
        for each in arrow:
            require_fetched(each)
            check_stream(each)
        found = datasets.load_from_disk(str(directory))
        files = [Path(file["filename"]) for file in found.cache_files]
        large = [each for each in files if each.stat().st_size > SAMPLED_FROM_BYTES]
        whole = [] if is_tokenised(found.data.table) else content_digests(large, digests)
        content = digest(*map(file_digest, files), *whole)
        watched = WatchedFiles(files, may_grow=True)
        return Saved(path=str(path), table=found.data.table, content=content, files=watched)
    except PermissionError as error:
        raise DataFileUnreadable(path=error.filename or str(path), reason=error.strerror or str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise DamagedDataset(path=str(path), reason=_first_line(error)) from error


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
        raise DamagedDataset(path=str(directory / _STATE), reason=_first_line(error)) from error


def _of_split(path: Path, key: str, split: SplitName) -> Path:
    if not (path / _SPLITS).is_file():
        return path
    names = tuple(sorted(child.name for child in path.iterdir() if (child / _STATE).is_file()))
    if split not in names:
        advice = f"Name the directory of one split, such as {path / (names or ('train',))[0]}."
        raise SplitMissing(key=key, path=str(path), wanted=split, splits=names, advice=advice)
    return path / split


def _other(path: Path, key: str) -> NxdtError:
    if path.is_file():
        found, name = "it is a file", path.name
    else:
        inside = sorted(child.name for child in path.iterdir())
        saved = [child for child in inside if is_saved(path / child)]
        if saved:
            return NoDataset(key=key, path=str(path), found=f"but {path / saved[0]} is", advice="Name that directory.")
        found = f"it holds {', '.join(inside[:3])}" if inside else "it is empty"
        name = next(iter(inside), "")
    if name.endswith((".parquet", ".arrow", *JSON_LINES, *COMPRESSED)):
        advice = "Set data.streaming to true to read such files as they are, or save them with datasets' save_to_disk."
        return NoDataset(key=key, path=str(path), found=found, advice=advice)
    return NoDataset(key=key, path=str(path), found=found)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
