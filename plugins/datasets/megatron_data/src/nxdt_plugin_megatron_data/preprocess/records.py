"""Work of a tokenising process: a block of records becomes tokens, and records without text are reported with their
line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.files.encodings import iconv_name
from nxdt_core.data.files.paths import parse_json
from nxdt_core.data.tokens import encode_documents
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_megatron_data.indexed_files import dtype_for
from nxdt_plugin_megatron_data.preprocess.tokenizers import NamedTokenizer

_NOT_UTF8 = "not UTF-8"


@dataclass(frozen=True, slots=True)
class Fault:
    """A record without text."""

    line: int
    """Counted from the first line of the block, which is 0."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationOptions:
    """Settings by which records become tokens."""

    text_key: str
    separator: str | None
    append_eod: bool


@dataclass(slots=True, kw_only=True)
class Encoded:
    """Result of one block."""

    tokens: bytes = b""
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    records: int = 0
    empty: int = 0
    """Records whose text has no token."""
    faults: list[Fault] = field(default_factory=list)


class RecordEncoder:
    """Encodes blocks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, recipe: TokenizationOptions) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._dtype = dtype_for(tokenizer.vocab_size)
        self._tail = np.array([tokenizer.eos_id] if recipe.append_eod else [], self._dtype)

    def encode(self, content: bytes, *, json_lines: bool) -> Encoded:
        """Return the tokens of a block's records; a blank line is not a record."""
        found = Encoded()
        records = self._texts_of_lines(content) if json_lines else self._texts(content)
        texts = []
        for line, text, reason in records:
            found.records += 1
            if text is None:
                found.faults.append(Fault(line, reason))
            else:
                texts.append(text)
        found.faults = list(_with_encoding(found.faults, content))
        parts: list[NDArray[Any]] = []
        lengths = []
        for ids in encode_documents(texts, self._tokenizer):
            if len(ids):
                parts += [ids, self._tail]
                lengths.append(len(ids) + len(self._tail))
        found.empty = len(texts) - len(lengths)
        found.lengths = np.array(lengths, np.int32)
        found.tokens = np.concatenate(parts, dtype=self._dtype, casting="unsafe").tobytes() if parts else b""
        return found

    def _texts_of_lines(self, content: bytes) -> Iterator[tuple[int, str | None, str]]:
        """Line, text and what is wrong, of each line that is not blank."""
        for line, record in enumerate(content.split(b"\n")):
            if record.strip():
                yield (line, *_text_of(record, self._recipe.text_key))

    def _texts(self, content: bytes) -> Iterator[tuple[int, str | None, str]]:
        """Yield line, text and problem of each document that is not blank; the line is the document's first."""
        separator = self._recipe.separator
        line = 0
        for record in content.split(separator.encode()) if separator else [content]:
            if record.strip():
                yield (line, *_decoded(record))
            line += record.count(b"\n") + (separator or "").count("\n")


def _with_encoding(faults: list[Fault], content: bytes) -> Iterator[Fault]:
    """Yield the faults, and with those that are not UTF-8 the likeliest encoding of the block and what converts it."""
    likely = None
    for fault in faults:
        if not fault.reason.startswith(_NOT_UTF8):
            yield fault
            continue
        if likely is None:
            name = iconv_name(content, _first_bad_byte(content))
            likely = f"; it looks like {name}, which 'iconv -f {name} -t UTF-8' converts" if name else ""
        yield replace(fault, reason=f"{fault.reason}{likely}")


def _first_bad_byte(content: bytes) -> int:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _text_of(record: bytes, key: str) -> tuple[str | None, str]:
    text, reason = _decoded(record)
    if text is None:
        return None, reason
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return None, f"not a JSON object: {error}"
    if not isinstance(value, dict):
        return None, f"not a JSON object: it is a {type(value).__name__}"
    if key not in value:
        keys = ", ".join(repr(name) for name in value) or "none"
        return None, f"no text under the key {key!r}; its keys are {keys}"
    if not isinstance(value[key], str):
        return None, f"the value under the key {key!r} is not text, but of type {type(value[key]).__name__}"
    try:
        value[key].encode()
    except UnicodeEncodeError:
        return None, f"the text under the key {key!r} holds half a character (a lone surrogate)"
    return value[key], ""


def _decoded(record: bytes) -> tuple[str | None, str]:
    try:
        return record.decode(), ""
    except UnicodeDecodeError as error:
        return None, f"{_NOT_UTF8}: byte {record[error.start]:#04x}"


_encoder: RecordEncoder | None = None


def _leave_with_parent() -> None:
    """End this process with the one that started it, which may have been killed. (A pool's processes wait for ever.)"""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def start_worker(tokenizer: NamedTokenizer, recipe: TokenizationOptions) -> None:
    """Make this process's encoder. Its tokenizer runs on one thread: the processes are as many as the cores."""
    global _encoder  # noqa: PLW0603 -- a pool gives its processes no other place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's affair
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = RecordEncoder(tokenizer.build(), recipe)


def encode_here(content: bytes, json_lines: bool) -> Encoded:
    """Encode a block in a process that :func:`start_worker` has prepared."""
    assert _encoder is not None
    return _encoder.encode(content, json_lines=json_lines)
