"""Where a Hugging Face tokenizer may come from: a file, a directory, a pair of BPE files, a hub name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxdt_core.config.sources import expand_home
from nxdt_core.data.tokenizers.files import import_library, read_file
from nxdt_core.errors.data import BadTokenizerFile, TokenizerFileNotFound

__all__ = [
    "FILE",
    "Loaded",
    "load_named",
    "load_pair",
    "load_path",
    "local_path",
    "read_json",
    "read_record",
    "token_text",
]

FILE = "tokenizer.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")
_PATTERNS = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
"""Files of a repository on the hub that a tokenizer may consist of; all small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A tokenizer and the facts that its files state."""

    tokenizer: Any
    """``tokenizers.Tokenizer``."""
    content: bytes
    """The content that determines its ids; part of the fingerprint."""
    origin: str
    """File or name, for errors."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token``, ``pad_token`` → the token, where the files name one."""
    directory: Path | None = None
    """Directory of its further files, such as its chat template and other files that transformers reads."""
    is_json: bool = True
    """Whether :attr:`content` is a ``tokenizer.json``."""


def local_path(text: str) -> Path | None:
    """``text`` as a path; None where it can only be a hub name (``name`` or ``owner/name``, and no such file)."""
    path = expand_home(text)
    looks_like_name = (
        not path.is_absolute() and text.count("/") <= 1 and text[:1] not in ".~" and path.suffix != ".json"
    )
    return None if looks_like_name and not path.exists() else path


def load_path(path: Path, library: Any, *, key: str) -> Loaded:
    """Load a ``tokenizer.json``, or a directory that holds one or that ``transformers`` can convert.

    Raises:
        TokenizerFileNotFound: there is neither.
        BadTokenizerFile: the file is not a tokenizer, or the directory holds none.
    """
    if path.is_dir():
        return load_path(path / FILE, library, key=key) if (path / FILE).is_file() else _convert(path)
    content = read_file(path, key=key, wanted="tokenizer.json or directory with one")
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise BadTokenizerFile(path=str(path), wanted=FILE, reason=_first_line(error)) from error
    return Loaded(
        tokenizer=tokenizer,
        content=content,
        origin=str(path),
        special_tokens=_special_tokens(path.parent),
        directory=path.parent,
    )


def load_pair(vocab_file: Path, merge_file: Path, library: Any) -> Loaded:
    """Build a byte-level BPE tokenizer of ``vocab.json`` and ``merges.txt``, with GPT-2's splitting into words."""
    content = b"\0".join(
        read_file(path, key=f"data.tokenizer.{key}", wanted="file of a BPE tokenizer")
        for key, path in (("vocab_file", vocab_file), ("merge_file", merge_file))
    )
    try:
        tokenizer = library.Tokenizer(library.models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # the library raises bare Exception
        raise BadTokenizerFile(
            path=f"{vocab_file} with {merge_file}", wanted="byte-level BPE tokenizer", reason=_first_line(error)
        ) from error
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    end = "<|endoftext|>"
    special = {"bos_token": end, "eos_token": end} if tokenizer.token_to_id(end) is not None else {}
    if special:
        tokenizer.add_special_tokens([end])
    return Loaded(tokenizer=tokenizer, content=content, origin=str(vocab_file), special_tokens=special, is_json=False)


def load_named(name: str, library: Any) -> Loaded:
    """Load a pretrained tokenizer from the local cache of the hub, or download its files there.

    Raises:
        TokenizerFileNotFound: the hub does not know it, or does not answer.
        BadTokenizerFile: it has no fast tokenizer.
    """
    hub = import_library("huggingface_hub", tokenizer="huggingface", extra="huggingface")
    try:
        directory = hub.snapshot_download(name, allow_patterns=list(_PATTERNS))
    except (OSError, ValueError) as error:
        wanted = f"file or directory, nor a pretrained tokenizer on the hub ({_first_line(error)})"
        raise TokenizerFileNotFound(key="data.tokenizer.type", path=name, wanted=wanted) from error
    return load_path(Path(directory), library, key="data.tokenizer.type")


def _convert(directory: Path) -> Loaded:
    transformers = import_library("transformers", tokenizer="huggingface", extra="huggingface")
    try:
        pretrained = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # converters raise what their formats' libraries raise
        wanted = f"directory with a {FILE} or with files that transformers converts"
        raise BadTokenizerFile(path=str(directory), wanted=wanted, reason=_first_line(error)) from error
    return _from_pretrained(pretrained, directory)


def _from_pretrained(pretrained: Any, directory: Path) -> Loaded:
    backend = getattr(pretrained, "backend_tokenizer", None)
    if backend is None:
        reason = f"{type(pretrained).__name__} is a slow tokenizer"
        raise BadTokenizerFile(path=str(directory), wanted="fast tokenizer", reason=reason)
    special = {key: str(token) for key in _SPECIAL if (token := getattr(pretrained, key, None)) is not None}
    return Loaded(
        tokenizer=backend,
        content=backend.to_str().encode(),
        origin=str(directory),
        special_tokens=special,
        directory=directory,
    )


def read_record(directory: Path) -> dict[str, Any]:
    """Return the settings of a ``tokenizer.json`` in the files next to it, with the precedence of ``transformers``.

    It no longer writes ``special_tokens_map.json``. An old one takes precedence, unless the newer file is complete,
    that is, also lists its added tokens.
    """
    newer = read_json(directory / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in newer else read_json(directory / "special_tokens_map.json")
    return {**newer, **older}


def _special_tokens(directory: Path) -> dict[str, str]:
    record = read_record(directory)
    named = {key: token_text(record.get(key)) for key in _SPECIAL}
    return {key: token for key, token in named.items() if token is not None}


def token_text(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with ``content``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        record = json.loads(read_file(path, key="data.tokenizer.model", wanted="JSON file"))
    except (ValueError, RecursionError) as error:
        raise BadTokenizerFile(path=str(path), wanted="JSON file", reason=str(error)) from error
    return record if isinstance(record, dict) else {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
