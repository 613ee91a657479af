"""Files from the paths and patterns of a configuration, and text or JSON objects from a file.

Formats of records do not live here: a dataset plugin knows what its objects hold.

Files that a run keeps reading have the size that they had at its start. Access to a page beyond the end of a mapped
file kills the process (SIGBUS), and a shorter file of records looks like a complete one. So code that maps or reads a
file again checks its size first. Two cases remain undetected: a file that is truncated between the check and the read,
and a file that is overwritten with as many bytes.
"""

from __future__ import annotations

import codecs
import difflib
import glob
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core.config.hub import complete
from nxdt_core.config.section import Fraction, PositiveInt, Section, Written
from nxdt_core.data.files.compressed import COMPRESSED, UNREADABLE, opened
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.data import BadJsonLine, DataFileChanged, DataFileNotFound, DataFileUnreadable, TextNotUtf8
from nxdt_core.protocols.dataset import SplitName
from nxdt_core.system.paths import PackageNotFound, resolve_path

_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""
_ZEROS: Mapping[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
"""Encodings in which a character of ASCII has two or four bytes, by which of the first four bytes are 0."""
_WESTERN_SHARE = 0.2
"""Most bytes above ASCII in a text of CP1252; where there are more, the text is in another script."""
_SAMPLE_BYTES = 32768
_SHOWN = 40
"""Characters of the line that the error shows."""

JSON_LINES = (".jsonl", ".ndjson")
"""Endings of files with an object per line."""
JSON_TEXTS = (*JSON_LINES, ".json")
"""Endings of JSON files of corpora, where nothing else is meant by ``.json``."""
EXPANDS_TO_BYTES, EXPANDS_BY = 1 << 30, 200
"""Bytes that a compressed file may expand to in any case, and how many times its size otherwise (text: about ten)."""
_PART_BYTES = 1 << 24
_BOM = "\ufeff"
PACKED = {b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard"}
"""First bytes of compressed files."""
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character, or a whole one in two escapes."""
_SPELLINGS: Mapping[SplitName, tuple[str, str]] = {
    "train": ("train_files", "train_dir"),
    "validation": ("validation_files", "val_dir"),
    "test": ("test_files", "test_dir"),
}


def _utf16_or_32(content: bytes) -> str | None:
    """Return the name of UTF-16 or UTF-32 where ``content`` begins as such a text, with its mark or without."""
    for mark, name in _MARKS:
        if content.startswith(mark):
            return name
    return _ZEROS.get(tuple(byte == 0 for byte in content[:4]))


def check_utf8_start(path: Path, content: bytes, *, first_line: int = 1) -> None:
    """Let ``content`` pass unless it begins as UTF-16 or UTF-32, of which plain English is UTF-8 with zeros, too.

    Raises:
        TextNotUtf8: it does.
    """
    if _utf16_or_32(content) is not None:
        at = max(0, content[:4].find(b"\0")) if content[:1] < b"\x80" else 0
        raise not_utf8(path, content, at, first_line=first_line)


def iconv_name(content: bytes, at: int) -> str | None:
    """Return what ``iconv`` calls UTF-16, UTF-32 or CP1252 where ``content`` looks like it; None where it does not.

    Args:
        content: bytes of a file, or of a part of it.
        at: place of a byte that is not UTF-8; the lines around it decide.
    """
    wide = _utf16_or_32(content)
    if wide is not None:
        return wide
    begin = max(0, at - _SAMPLE_BYTES)
    end = min(len(content), at + _SAMPLE_BYTES)
    begin = max(begin, content.find(b"\n", begin, at) + 1) if begin else 0
    last = content.rfind(b"\n", at, end) if end < len(content) else -1
    around = content[begin : end if last < 0 else last]
    western = sum(byte >= 0x80 for byte in around) <= _WESTERN_SHARE * len(around)
    with suppress(UnicodeDecodeError):
        return "CP1252" if western and around.decode("cp1252") else None
    return None


def not_utf8(path: Path, content: bytes, at: int, *, first_line: int = 1) -> NxdtError:
    """Return the error of ``content``, whose byte ``at`` is not UTF-8, with the command that converts the file.

    Args:
        path: path of the file, for errors.
        content: bytes of the file, or of a part of it.
        at: place of the byte.
        first_line: number of the line with which ``content`` begins.
    """
    begin = content.rfind(b"\n", 0, at) + 1
    encoding, shown = iconv_name(content, at), ""
    if encoding and encoding.startswith("UTF"):  # of wide characters, the start of the line
        shown = content[: 8 * _SHOWN].decode(encoding, "ignore").partition("\n")[0][:_SHOWN].strip()
    elif encoding:  # the text around the byte
        line = content[begin : at + 4 * _SHOWN].decode(encoding, "replace").partition("\n")[0]
        ahead = len(content[begin:at].decode(encoding, "replace"))
        shown = line[max(0, ahead - _SHOWN // 2) : ahead + _SHOWN // 2].strip()
    stem, *endings = path.name.split(".")
    result = shlex.quote(str(path.with_name(".".join([stem, "utf-8", *endings]))))
    convert, source = f"iconv -f {encoding or 'ENCODING'} -t UTF-8", shlex.quote(str(path))
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    return TextNotUtf8(
        path=str(path),
        position=at - begin,
        line=first_line + content.count(b"\n", 0, at),
        byte=content[at],
        encoding=encoding or "",
        shown=shown,
        command=f"{packed} -dc {source} | {convert} | {packed} -c > {result}"
        if packed
        else f"{convert} {source} > {result}",
    )


def expand(patterns: Iterable[Path | str], key: str) -> list[Path]:
    """Return the files that ``patterns`` name, in their order, the matches of each sorted by name.

    A pattern begins after the part of its path that exists as written: the directory ``exp[1]`` never means ``exp1``.

    Args:
        patterns: paths, patterns (``corpus/*.txt``) and ``package://`` paths.
        key: configuration key that names the file, for errors.

    Raises:
        DataFileNotFound: a path or pattern matches no file; names what is found nearby.
        DataFileUnreadable: it is a pipe or a device.
        HubError: files of the Hugging Face hub cannot be downloaded.
    """
    files: list[Path] = []
    for pattern in patterns:
        try:
            path = resolve_path(pattern)
        except PackageNotFound as error:
            raise DataFileNotFound(key=key, path=str(pattern)) from error
        complete(path)
        literal = next(str(part) for part in (path, *path.parents) if os.path.exists(part))
        matches = glob.glob(glob.escape(literal) + str(path)[len(literal) :], recursive=True)
        matching = [p for match in sorted(matches) if (p := Path(match)).is_file()]
        if not matching and path.exists() and not path.is_dir():
            raise DataFileUnreadable(path=str(path), reason="it is not a file, and files are read more than once")
        if not matching:
            near, directory = similar_files(path), path.is_dir()
            raise DataFileNotFound(key=key, path=str(pattern), candidates=near, directory=directory)
        files += matching
    return files


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """Return the first ``limit`` bytes of a file, or all, decompressed where its name ends in ``.gz`` or ``.zst``.

    Raises:
        DataFileUnreadable: no permission, an error of the disk, damaged compressed data, or a small file that expands
            without end.
    """
    try:
        with opened(path) as file:
            if limit >= 0 or path.suffix.lower() not in COMPRESSED:
                return file.read(limit)
            content, most = io.BytesIO(), max(EXPANDS_TO_BYTES, EXPANDS_BY * path.stat().st_size)
            while part := file.read(_PART_BYTES):
                content.write(part)
                if content.tell() > most:  # a bomb
                    reason = f"it expands to more than {EXPANDS_BY} times its size and {EXPANDS_TO_BYTES >> 20} MiB"
                    raise DataFileUnreadable(path=str(path), reason=reason)
            return content.getvalue()
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFileUnreadable(path=str(path), reason=reason) from error


def decode(path: Path, content: bytes, *, first_line: int = 1) -> str:
    """Return the text of ``content``, which is UTF-8 and may begin with a byte order mark.

    Args:
        path: path of the file, for errors.
        content: bytes of the file, or of a part of it.
        first_line: number of the line with which ``content`` begins.

    Raises:
        TextNotUtf8: names the byte and the line, the likeliest encoding, and the command that converts the file.
        DataFileUnreadable: the file is compressed, and its name does not end in ``.gz`` or ``.zst``.
    """
    check_utf8_start(path, content, first_line=first_line)
    try:
        return content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        if packed := next((name for begin, name in PACKED.items() if content.startswith(begin)), None):
            reason = f"it is compressed with {packed}, and only gzip and Zstandard are read, from .gz and .zst files"
            raise DataFileUnreadable(path=str(path), reason=reason) from error
        raise not_utf8(path, content, error.start, first_line=first_line) from error


def json_objects(path: Path, text: str, *, example: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each line that is not blank, with the line's number.

    Args:
        path: named in errors.
        text: decoded text of the file.
        example: an object as it is wanted, for errors.

    Raises:
        BadJsonLine: a line is not JSON, or not an object.
    """
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold U+2028
        if line.strip():
            yield number, json_object(path, number, line, example=example)


def json_object(path: Path, number: int, line: str | bytes, *, example: str = "") -> dict[str, Any]:
    """Return the object of one line; ``example`` is one as it is wanted, for errors.

    Raises:
        BadJsonLine: it is not JSON, or not an object, or holds half a character, which no tokenizer has.
        TextNotUtf8: its bytes are not UTF-8.
    """
    if isinstance(line, bytes):
        line = decode(path, line, first_line=number)
    try:
        record: Any = parse_json(line)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise BadJsonLine(path=str(path), line=number, reason=reason, example=example) from error
    if not isinstance(record, dict):
        raise BadJsonLine(path=str(path), line=number, reason=f"it is a {type(record).__name__}", example=example)
    if half := lone_surrogate(line, record):
        raise BadJsonLine(path=str(path), line=number, reason=f"it holds half a character, {half}", example=example)
    return record


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return table


parse_json: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_without_repeats).decode
"""Returns the value of a JSON text; a key that an object has twice is a ValueError."""


def lone_surrogate(text: str, value: Any) -> str:
    """Return half of a character, as JSON writes it, that ``value`` holds, which was read from ``text``; "" for none.

    No tokenizer has half a character, and no encoding writes it.
    """
    if _ESCAPED.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"\\u{ord(error.object[error.start]):x}"
    return ""


def similar_files(path: Path) -> tuple[str, ...]:
    """Return files with a similar name next to ``path``, or those in it where it is a directory."""
    if path.is_dir():
        return tuple(sorted(str(path / p.name) for p in path.iterdir() if p.is_file()))
    if not path.parent.is_dir():
        return ()
    names = sorted(p.name for p in path.parent.iterdir())
    return tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3))


class WatchedFiles:
    """Files, and their sizes when this was made.

    Args:
        paths: the files; one that does not exist is left to the code that opens it.
        may_grow: whether more bytes behind the known ones do no harm.
    """

    def __init__(self, paths: Iterable[Path], *, may_grow: bool) -> None:
        sizes = ((path, _size(path)) for path in paths)
        self._sizes = {path: size for path, size in sizes if size is not None}
        self._may_grow = may_grow

    def check(self, *paths: Path) -> None:
        """Compare the size of ``paths``, or of all files, with what it was; one that is gone may still be open.

        Raises:
            DataFileChanged: it is another one.
        """
        for path in paths or self._sizes:
            before, now = self._sizes.get(path), _size(path)
            if before is None or now is None or now == before or (self._may_grow and now > before):
                continue
            raise DataFileChanged(path=str(path), before=before, now=now)


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


class RecordFiles(Section):
    """Base of the configurations of data whose files hold records."""

    train_files: tuple[Path, ...] = ()
    """Files to train on, in this order."""
    validation_files: tuple[Path, ...] = ()
    """Files to validate on."""
    test_files: tuple[Path, ...] = ()
    """Files to test on, with ``trainer.test`` of the Lightning plugin. ``nxdt train`` does not read them."""
    train_dir: Path | None = None
    """``train_files`` with one path, as NxD Training calls it."""
    val_dir: Path | None = None
    """``validation_files`` with one path, as NxD Training calls it."""
    test_dir: Path | None = None
    """``test_files`` with one path, as NxD Training calls it."""
    validation_fraction: Fraction = 0.0
    """Share of the training records to validate on instead of files, drawn by ``split_seed``; 0 takes none."""
    split_seed: int = 0
    """Decides which records validate. It is not the run's seed, so that another run trains on the same records."""
    dev_choose_samples: PositiveInt | None = None
    """Use only so many records of each split's files, the first ones; ``null`` uses all."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Names of the files' own columns, where they differ from those of a format: ``{prompt: question}`` reads the
    column ``question`` as ``prompt``."""
    bad_records: Literal["refuse", "drop"] = "refuse"
    """Treatment of a record that cannot be used: stop with its place (``refuse``), or leave it out, counted and listed
    (``drop``)."""
    max_bad_share: Fraction = 0.01
    """Share of the records that ``bad_records: drop`` may leave out; more stop the run."""
    turn_order: Literal["refuse", "merge"] = "refuse"
    """Treatment of messages out of turn. ``refuse`` makes the record a bad one. ``merge`` joins messages of one speaker
    in a row, and gives the text of later system messages to the user."""

    cache_dir: Annotated[Path | None, Written()] = None
    """Directory of the tokens for all runs with the same data, tokenizer and settings; ``null``: ``data/`` of the run's
    directory."""
    cache_gib: PositiveInt | None = None
    """GiB that ``cache_dir`` may hold: what no run has used for longest goes. ``null`` sets no limit."""

    @property
    def cache_bytes(self) -> int | None:
        """Return the limit of the cache in bytes."""
        return None if self.cache_gib is None else self.cache_gib << 30

    def files(self, split: SplitName) -> tuple[Path, ...]:
        """Return the paths of a split, by either spelling."""
        files, directory = (getattr(self, key) for key in _SPELLINGS[split])
        return files if directory is None else (directory,)

    def check(self) -> Iterator[tuple[str, str | NxdtError]]:
        """Yield what cannot work with any files, as (key, message)."""
        for named, single in _SPELLINGS.values():
            if getattr(self, named) and getattr(self, single) is not None:
                yield single, f"{named} is given too; keep one of the two"
        if not any(map(self.files, _SPELLINGS)):
            yield "train_files", "no files are named; give at least one path or pattern"
        if self.cache_gib is not None and self.cache_dir is None:
            yield "cache_gib", "it limits data.cache_dir, which is not set"
        if self.validation_fraction >= 1:
            yield "validation_fraction", f"{self.validation_fraction} leaves nothing to train on"
        if self.validation_fraction and self.files("validation"):
            yield "validation_fraction", "files to validate on are named too; set one of the two"
        if self.validation_fraction and not self.files("train"):
            yield "validation_fraction", "there are no train_files to take a share of"
