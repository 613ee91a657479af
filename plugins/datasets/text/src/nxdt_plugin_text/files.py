"""From files to documents, with every way in which that goes wrong named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxdt_core.data.files.compressed import bare_name
from nxdt_core.data.files.paths import JSON_TEXTS, decode, json_objects
from nxdt_core.errors.data import EmptyTextFile, JsonTextMissing

__all__ = ["documents"]


def documents(path: Path, content: bytes, *, text_key: str, separator: str | None) -> Iterator[str]:
    """Documents of one file, none of them blank.

    Args:
        path: names the file in errors; its suffix determines the format.
        content: result of :func:`nxdt_core.data.files.paths.read_bytes`.
        text_key: key of the text in JSONL.
        separator: separates documents of plain text; None: the file is one document.

    Raises:
        EmptyTextFile, TextNotUtf8, BadJsonLine, JsonTextMissing: the content is not usable.
    """
    empty = True
    text = decode(path, content)
    texts = _json_texts(path, text, text_key) if bare_name(path).endswith(JSON_TEXTS) else _split(text, separator)
    for document in texts:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise EmptyTextFile(path=str(path))


def _split(text: str, separator: str | None) -> list[str]:
    return [text] if separator is None else text.split(separator)


def _json_texts(path: Path, text: str, key: str) -> Iterator[str]:
    for number, record in json_objects(path, text, example=f'{{"{key}": "..."}}'):
        yield _text_of(path, number, record, key)


def _text_of(path: Path, number: int, record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        keys = ", ".join(repr(k) for k in record) or "none"
        found = f"its keys are {keys}" if key not in record else f"its value is a {type(value).__name__}"
        raise JsonTextMissing(path=str(path), line=number, key=key, found=found)
    return value
