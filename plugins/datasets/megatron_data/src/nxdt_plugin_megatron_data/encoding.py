"""Tokenisers of ``nxdt data preprocess``, and the work of its processes: a block of records becomes tokens, and records
without text are reported with their line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.config.read import read_part
from nxdt_core.config.sources import COMMAND_LINE, read_overrides
from nxdt_core.config.tree import Tree
from nxdt_core.data.files.paths import iconv_name, parse_json
from nxdt_core.data.tokenizers.files import holds_ranks
from nxdt_core.data.tokens import encode_documents
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.system.paths import expand_home
from nxdt_plugin_megatron_data.indexed_files import dtype_for

_LLAMA_3_RANKS = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTokenizer:
    """A component of kind ``tokenizer`` and its configuration."""

    label: str
    """Name under which the user chose it."""
    component: str
    config: Any

    def build(self) -> Tokenizer:
        """Make it."""
        component = Kernel.start().registry.get("tokenizer", self.component)
        return component.load_class(Tokenizer)(self.config)


def find_tokenizer(name: str, options: Sequence[str] = ()) -> NamedTokenizer:
    """Return the tokenizer of a name.

    Args:
        name: a component, such as ``byte`` (``./byte`` is a path); a path: a ``tokenizer.json``, a directory, a
            ``.model`` of SentencePiece or of Llama 3; or a name on the Hugging Face hub.
        options: ``KEY=VALUE`` of the section ``data.tokenizer``; ``library`` among them chooses the component.

    Raises:
        ConfigError: an option is wrong.
        UnknownComponent: there is no such library.
    """
    trees, problems = read_overrides(options)
    section = Tree({}, {(): COMMAND_LINE})
    for tree in trees:
        section.merge(tree)
    kernel = Kernel.start()
    library = section.get("library")
    path = expand_home(name)
    records = [component.record for component in kernel.registry.all("tokenizer")]
    if library is None and any(name in (record.name, *record.aliases) for record in records):
        library, named = name, {}
    else:
        if library is None:
            library = "huggingface"
            if path.suffix == ".model" and path.is_file():
                # Llama 3's rank file alone is known to match the library's pattern for splitting text into words.
                content = path.read_bytes()
                ranks = holds_ranks(content) and content.count(b"\n") == _LLAMA_3_RANKS
                library = "tiktoken" if ranks else "sentencepiece"
        if library == "huggingface" and not path.exists():
            named = {"type": name}
        else:
            named = {"vocab_file" if library == "megatron" else "model": str(path.absolute())}
        named = {} if "vocab_file" in section else named
    for key, value in named.items():
        if key not in section:
            section.set(key, value, COMMAND_LINE)
    component = kernel.registry.get("tokenizer", str(library))
    section.remove("library")
    if problems:
        raise ConfigError(source="--tokenizer-option", problems=tuple(problems))
    cls, config = component.load_config(), None
    if cls is not None:
        config, wrong = read_part(cls, section, "data.tokenizer")
        if wrong:
            raise ConfigError(source="--tokenizer", problems=tuple(wrong))
    return NamedTokenizer(label=name, component=component.qualified_name, config=config)


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
    faults: list[tuple[int, str]] = field(default_factory=list)
    """Line, counted from the first of the block, which is 0, and problem of each record without text."""


class RecordEncoder:
    """Encodes blocks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, recipe: TokenizationOptions) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._dtype = dtype_for(tokenizer.vocab_size)

    def encode(self, content: bytes, *, json_lines: bool) -> Encoded:
        """Return the tokens of a block's records; a blank line is not a record."""
        encoded, texts, likely = Encoded(), list[str](), None
        for line, record in self._records(content, json_lines):
            encoded.records += 1
            try:
                texts.append(_text_of(record, self._recipe.text_key) if json_lines else record.decode())
            except UnicodeDecodeError as error:
                if likely is None:  # the likeliest encoding of the block, and what converts it
                    name = iconv_name(content, content.index(record) + error.start)
                    likely = f"; it looks like {name}, which 'iconv -f {name} -t UTF-8' converts" if name else ""
                encoded.faults.append((line, f"not UTF-8: byte {record[error.start]:#04x}{likely}"))
            except ValueError as error:
                encoded.faults.append((line, str(error)))
        eod_id = self._tokenizer.eos_id if self._recipe.append_eod else None
        documents = [ids for ids in encode_documents(texts, self._tokenizer, eos_id=eod_id) if len(ids)]
        encoded.empty = len(texts) - len(documents)
        encoded.lengths = np.array([*map(len, documents)], np.int32)
        if documents:
            encoded.tokens = np.concatenate(documents, dtype=self._dtype, casting="unsafe").tobytes()
        return encoded

    def _records(self, content: bytes, json_lines: bool) -> Iterator[tuple[int, bytes]]:
        """Yield each line, or document of a text file, that is not blank, with the number of its first line."""
        separator, line = "\n" if json_lines else self._recipe.separator, 0
        for record in content.split(separator.encode()) if separator else [content]:
            if record.strip():
                yield line, record
            line += record.count(b"\n") + (separator or "").count("\n")


def _text_of(record: bytes, key: str) -> str:
    """Return the text under a key of a JSON object.

    Raises:
        ValueError: there is none; the message says why. A ``UnicodeDecodeError`` where the record is not UTF-8.
    """
    decoded = record.decode()
    try:
        value = parse_json(decoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: it is a {type(value).__name__}")
    if key not in value:
        keys = ", ".join(repr(name) for name in value) or "none"
        raise ValueError(f"no text under the key {key!r}; its keys are {keys}")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"the value under the key {key!r} is not text, but of type {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text under the key {key!r} holds half a character (a lone surrogate)") from error
    return text


_encoder: RecordEncoder | None = None


def start_worker(tokenizer: NamedTokenizer, recipe: TokenizationOptions) -> None:
    """Make this process's encoder. Its tokenizer runs on one thread: the processes are as many as the cores."""
    global _encoder  # noqa: PLW0603 -- a pool gives its processes no other place

    def leave_with_parent() -> None:
        """End this process with the one that started it, which may have been killed; a pool's processes wait for
        ever."""
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's affair
    threading.Thread(target=leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = RecordEncoder(tokenizer.build(), recipe)


def encode_here(content: bytes, json_lines: bool) -> Encoded:
    """Encode a block in a process that :func:`start_worker` has prepared."""
    assert _encoder is not None
    return _encoder.encode(content, json_lines=json_lines)
