"""Splits that the names of directories and files carry, by the keywords that ``datasets`` knows them by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxdt_core.protocols.dataset import SplitName
from nxdt_plugin_hf_data.errors import SplitMissing, SplitUnclear

__all__ = ["of_split"]

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
        key: of the configuration, for errors.
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
    """What the directories of a file say, or where they say nothing, its own name."""
    directories = {_KEYWORDS[word] for part in path.parts[:-1] for word in _KEYWORD.findall(part)}
    return directories or {_KEYWORDS[word] for word in _KEYWORD.findall(path.name)}
