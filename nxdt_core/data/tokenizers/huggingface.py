"""Tokenizers of Hugging Face, from files, directories or the Hub, run by the ``tokenizers`` library.

``transformers``, whose import takes seconds, is asked only where it alone knows: to convert directories without
a ``tokenizer.json``.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.data.files.tables import first_line
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig, MegatronTokenizerConfig
from nxdt_core.data.tokenizers.files import FAST_TOKENIZER, encoded, import_library, read_file
from nxdt_core.errors.data import BadTokenizerConfig, BadTokenizerFile, TokenizerFileNotFound
from nxdt_core.protocols.tokenizer import LocatedIds, Tokenizer
from nxdt_core.system.paths import expand_home

FILE = "tokenizer.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")
_MOST_GROWTH = 1000
"""Characters that a normalizer or a decoder may make of one; published ones make a few."""
_PATTERNS = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
"""Files of a repository on the hub that a tokenizer may consist of; all small."""

FOR_TOOLS = "additional_chat_templates/tool_use.jinja"
"""File of the template for conversations with tools, where ``chat_template.jinja`` is another one."""
_CONFIG = "tokenizer_config.json"
_LEFT_OUT = ("chat_template", "auto_map", "is_local", "local_files_only", "backend")
"""Keys of ``tokenizer_config.json`` that an export leaves out: a template has its own file, code is not copied, and the
others are of the program that read the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A tokenizer and the facts that its files state."""

    tokenizer: Any
    """Instance of ``tokenizers.Tokenizer``."""
    content: bytes
    """The content that determines its ids; part of the fingerprint."""
    origin: str
    """File or name, for errors."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens by role (``bos_token``, ``eos_token``, ``pad_token``), where the files name one."""
    directory: Path | None = None
    """Directory of its further files, such as its chat template and other files that transformers reads."""
    is_json: bool = True
    """True where :attr:`content` is a ``tokenizer.json``."""


def local_path(text: str) -> Path | None:
    """Return ``text`` as a path; None where it can only be a hub name (``name`` or ``owner/name``, and no file)."""
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
        return _convert(path) if (content := _content(path, FILE)) is None else _loaded(path / FILE, content, library)
    return _loaded(path, read_file(path, key=key, wanted="tokenizer.json or directory with one"), library)


def _loaded(path: Path, content: bytes, library: Any) -> Loaded:
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise BadTokenizerFile(path=str(path), wanted=FILE, reason=first_line(error)) from error
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer, name)
        growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > _MOST_GROWTH:
            reason = f"its {name} makes {growth:.0f} characters of one (at most {_MOST_GROWTH})"
            raise BadTokenizerFile(path=str(path), wanted=FILE, reason=reason)
    record = read_record(path.parent)
    named = {key: token_text(record.get(key)) for key in _SPECIAL}
    return Loaded(
        tokenizer=tokenizer,
        content=content,
        origin=str(path),
        special_tokens={key: token for key, token in named.items() if token is not None},
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
            path=f"{vocab_file} with {merge_file}", wanted="byte-level BPE tokenizer", reason=first_line(error)
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
        wanted = f"file or directory, nor a pretrained tokenizer on the hub ({first_line(error)})"
        raise TokenizerFileNotFound(key="data.tokenizer.type", path=name, wanted=wanted) from error
    return load_path(Path(directory), library, key="data.tokenizer.type")


def _convert(directory: Path) -> Loaded:
    transformers = import_library("transformers", tokenizer="huggingface", extra="huggingface")
    for path in directory.iterdir():  # which of them are read is the library's business
        if any(path.match(pattern) for pattern in _PATTERNS):
            _content(directory, path.name)
    try:
        pretrained = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # converters raise what their formats' libraries raise
        wanted = f"directory with a {FILE} or with files that transformers converts"
        raise BadTokenizerFile(path=str(directory), wanted=wanted, reason=first_line(error)) from error
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


def _growth(part: object) -> float:
    """Return how many times as long as a text a normalizer or a decoder of a ``tokenizer.json`` can make it."""
    if not isinstance(part, dict):
        return math.prod(map(_growth, part)) if isinstance(part, list) else 1.0
    factor, pattern = 1.0, part.get("pattern")
    if part.get("type") == "Replace" and isinstance(pattern, dict):  # a regular expression may match between characters
        factor = (
            max(1.0, len(part["content"]) / len(text)) if (text := pattern.get("String")) else 1 + len(part["content"])
        )
    elif part.get("type") == "Prepend":
        factor = 1 + len(part["prepend"])
    elif (
        part.get("type") == "Precompiled"
    ):  # of SentencePiece: the size of a trie, the trie, and texts that end in zeros
        charsmap = base64.b64decode(part["precompiled_charsmap"] or "")
        factor = max(1, *map(len, charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")))
    return factor * math.prod(_growth(inner) for inner in part.values() if isinstance(inner, (dict, list)))


def token_text(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with ``content``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty where there is none."""
    content = _content(path.parent, path.name)
    try:
        record = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadTokenizerFile(path=str(path), wanted="JSON file", reason=str(error)) from error
    return record if isinstance(record, dict) else {}


def _content(directory: Path, name: str) -> bytes | None:
    """Return the content of a file of a tokenizer's directory; None where there is none."""
    path = directory / name
    if not path.is_file():
        return None
    return read_file(path, key="data.tokenizer.model", wanted="file of a tokenizer", directory=directory)


def _named_templates(directory: Path) -> Mapping[str, Any]:
    templates = {}
    for name, file in (("default", "chat_template.jinja"), ("tool_use", FOR_TOOLS)):
        if (content := _content(directory, file)) is not None:
            try:
                templates[name] = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
            except UnicodeDecodeError as error:
                path = str(directory / file)
                raise BadTokenizerFile(path=path, wanted="file of UTF-8 text", reason=str(error)) from error
    if templates:
        return templates
    template = read_json(directory / "chat_template.json").get("chat_template")
    template = read_record(directory).get("chat_template") if template is None else template
    if isinstance(template, list):  # an older form: several of them, each with a name
        return {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    return {"default": template}


class HuggingFaceTokenizer(Tokenizer):
    """Wraps ``tokenizers.Tokenizer``; truncation and padding that its file asks for are switched off.

    Raises:
        TokenizerLibraryMissing: tokenizers (or transformers, where it is needed) is not installed.
        TokenizerFileNotFound, BadTokenizerFile: of the files; each names the file.
        BadTokenizerConfig: the keys contradict each other, or name a token that is not in the vocabulary.
    """

    def __init__(self, config: HuggingFaceTokenizerConfig) -> None:
        for key, message in config.check():
            raise BadTokenizerConfig(key=f"data.tokenizer.{key}", reason=message)
        library = import_library("tokenizers", tokenizer="huggingface", extra="huggingface")
        if config.vocab_file is not None and config.merge_file is not None:
            loaded = load_pair(config.vocab_file, config.merge_file, library)
        elif config.model is not None:
            loaded = load_path(config.model, library, key="data.tokenizer.model")
        else:
            assert config.type is not None  # check() has refused a section without any source
            path = local_path(config.type)
            loaded = load_path(path, library, key="data.tokenizer.type") if path else load_named(config.type, library)
        if config.added_tokens:
            special = {config.bos_token, config.eos_token, config.pad_token}
            loaded.tokenizer.add_tokens(
                [library.AddedToken(token, normalized=False, special=token in special) for token in config.added_tokens]
            )
            loaded = replace(loaded, content=loaded.tokenizer.to_str().encode(), is_json=True)
        self._tokenizer: Any = loaded.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id: int | None = self._special("bos_token", config.bos_token, loaded)
        self.eos_id: int | None = self._special("eos_token", config.eos_token, loaded)
        self.pad_id: int | None = self._special("pad_token", config.pad_token, loaded)
        self._loaded = loaded
        self._fingerprint = digest("huggingface", loaded.content, self.bos_id, self.eos_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without the special tokens that the file's post-processor would add; a lone
        surrogate becomes U+FFFD."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        with self._panics_explained():
            ids: list[int] = encoded(lambda texts: encode(*texts), [text]).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the same for many texts, on the library's threads."""
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        with self._panics_explained():
            return [encoding.ids for encoding in encoded(encode, texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens and ids that are not in the vocabulary are left out."""
        return self._decoded(ids, skip_special_tokens=True)

    def fingerprint(self) -> str:
        """Digest of the tokenizer's file and of the special tokens that training puts around documents."""
        return self._fingerprint

    def leading_ids(self) -> Sequence[int]:
        """Return what the file's post-processor puts before a text."""
        with self._panics_explained():
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
        ids: list[int] = encoding.ids[: encoding.special_tokens_mask.index(0)]
        return ids

    def hf_files(self) -> Mapping[str, bytes]:
        """Return ``tokenizer.json``, ``tokenizer_config.json`` and what belongs to them, for transformers 4 and 5, with
        the special tokens that the configuration names.

        The class is the one that both take for a ``tokenizer.json`` as it is; others change its post-processor.
        """
        directory = self._loaded.directory
        record = {} if directory is None else read_record(directory)
        record = {key: token_text(value) or value for key, value in record.items() if key not in _LEFT_OUT}
        named = record.pop("model_specific_special_tokens", None) or {}
        extra: Any = record.pop("extra_special_tokens", None) or []  # transformers 5 has a list, and 4 a mapping
        if isinstance(extra, dict):
            named, extra = {**extra, **named}, []
        extra = [*(record.pop("additional_special_tokens", None) or ()), *extra]
        if extra:
            record["additional_special_tokens"] = [token_text(token) for token in extra]
        if named:
            record["extra_special_tokens"] = {name: token_text(token) for name, token in named.items()}
        record = {**FAST_TOKENIZER, **record, **self._named(), "tokenizer_class": FAST_TOKENIZER["tokenizer_class"]}
        content = self._loaded.content if self._loaded.is_json else self._tokenizer.to_str().encode()
        files = {FILE: content, _CONFIG: (json.dumps(record, indent=2) + "\n").encode()}
        if directory is not None and (model := _content(directory, "tokenizer.model")) is not None:
            files["tokenizer.model"] = model
        if (template := self.chat_template()) is not None:
            files["chat_template.jinja"] = template.encode()
        return files

    def chat_template(self) -> str | None:
        """Return the template next to the tokenizer, sought where transformers seeks it and in its order.

        Of several templates with names, ``tool_use`` renders conversations with tools and ``default`` all others.
        """
        named = {} if self._loaded.directory is None else _named_templates(self._loaded.directory)
        default, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(default, str) and isinstance(with_tools, str):
            with_tools, default = with_tools.removesuffix("\n"), default.removesuffix("\n")  # as Jinja does at the end
            return f"{{% if tools is not none +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif %}}"
        return default if isinstance(default, str) else None

    def special_tokens(self) -> Mapping[str, str]:
        """Return the tokens by the name that a template calls them by, such as ``unk_token``: what its files name, and
        what the configuration names instead."""
        record = {} if self._loaded.directory is None else read_record(self._loaded.directory)
        tokens = {key: token_text(value) for key, value in record.items() if key.endswith("_token")} | self._named()
        return {key: token for key, token in tokens.items() if token is not None}

    def reserved_tokens(self) -> Sequence[str]:
        """Return the added tokens that its file calls special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of :meth:`encode_batch` with the library's offsets."""
        encode = partial(self._tokenizer.encode_batch, add_special_tokens=False)
        with self._panics_explained():
            encodings = encoded(encode, texts)
        located: list[LocatedIds] = []
        for encoding in encodings:
            places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            ids = np.array(encoding.ids, dtype=np.int64)
            located.append(LocatedIds(ids=ids, starts=places[:, 0], ends=places[:, 1]))
        return located

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of :meth:`decode`, special tokens included."""
        return self._decoded(ids, skip_special_tokens=False)

    def _decoded(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        valid = [id_ for id_ in ids if 0 <= id_ < self.vocab_size]
        with self._panics_explained():
            text: str = self._tokenizer.decode(valid, skip_special_tokens=skip_special_tokens)
        return text

    @contextmanager
    def _panics_explained(self) -> Iterator[None]:
        """Say which file lets the library give up on a text: its regular expressions do after many steps."""
        try:
            yield
        except BaseException as error:  # a panic of Rust is a BaseException of a class that cannot be imported
            if type(error).__module__ != "pyo3_runtime" and type(error) is not Exception:
                raise
            wanted = "tokenizer of this text"
            raise BadTokenizerFile(path=self._loaded.origin, wanted=wanted, reason=first_line(error)) from error

    def _named(self) -> dict[str, str | None]:
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {key: None if id_ is None else self._tokenizer.id_to_token(id_) for key, id_ in ids.items()}

    def _special(self, key: str, configured: str | None, loaded: Loaded) -> int | None:
        token = configured if configured is not None else loaded.special_tokens.get(key)
        if token is None:
            return None
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None and configured is not None:
            raise BadTokenizerConfig(
                key=f"data.tokenizer.{key}", reason=f"{configured!r} is not in the vocabulary of {loaded.origin}"
            )
        return token_id


class MegatronTokenizer(HuggingFaceTokenizer):
    """GPT-2's ids. A text that spells out ``<|endoftext|>`` has that token, as in transformers.

    Raises:
        TokenizerLibraryMissing: tokenizers is not installed.
        TokenizerFileNotFound, BadTokenizerFile: of the files; each names the file.
        BadTokenizerConfig: a key names a token that is not in the vocabulary.
    """

    def __init__(self, config: MegatronTokenizerConfig) -> None:
        super().__init__(HuggingFaceTokenizerConfig(**config.model_dump(exclude={"type"})))
