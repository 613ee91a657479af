"""Detection of the encoding of bytes that are not UTF-8, for the error that says how to convert them."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.data import TextNotUtf8

__all__ = ["check_utf8_start", "iconv_name", "not_utf8"]


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
    around = _around(content, at)
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
    encoding = iconv_name(content, at)
    return TextNotUtf8(
        path=str(path),
        position=at - begin,
        line=first_line + content.count(b"\n", 0, at),
        byte=content[at],
        encoding=encoding or "",
        shown=_shown(content, begin, at, encoding) if encoding else "",
        command=_command(path, encoding or "ENCODING"),
    )


def _around(content: bytes, at: int) -> bytes:
    """Return the lines around a place, as far as they fit: a character that is cut in two is of no encoding."""
    begin = max(0, at - _SAMPLE_BYTES)
    end = min(len(content), at + _SAMPLE_BYTES)
    begin = max(begin, content.find(b"\n", begin, at) + 1) if begin else 0
    last = content.rfind(b"\n", at, end) if end < len(content) else -1
    return content[begin : end if last < 0 else last]


def _shown(content: bytes, begin: int, at: int, encoding: str) -> str:
    """Return the text around the byte ``at`` of the line that begins at ``begin``; of wide characters, of the start."""
    if encoding.startswith("UTF"):
        return content[: 8 * _SHOWN].decode(encoding, "ignore").partition("\n")[0][:_SHOWN].strip()
    line = content[begin : at + 4 * _SHOWN].decode(encoding, "replace").partition("\n")[0]
    ahead = len(content[begin:at].decode(encoding, "replace"))
    return line[max(0, ahead - _SHOWN // 2) : ahead + _SHOWN // 2].strip()


def _command(path: Path, encoding: str) -> str:
    """Return the command that writes the text as UTF-8 into a new file next to ``path``."""
    stem, *endings = path.name.split(".")
    result = shlex.quote(str(path.with_name(".".join([stem, "utf-8", *endings]))))
    convert, source = f"iconv -f {encoding} -t UTF-8", shlex.quote(str(path))
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if packed is None:
        return f"{convert} {source} > {result}"
    return f"{packed} -dc {source} | {convert} | {packed} -c > {result}"
