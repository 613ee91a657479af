"""Byte-level BPE of a file of ranks, run by the ``tiktoken`` library: Llama 3's ``tokenizer.model`` and its like."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from nxdt_core.data.cache import digest
from nxdt_core.data.tokenizers.config import TiktokenTokenizerConfig
from nxdt_core.data.tokenizers.files import FAST_TOKENIZER, import_library, located, read_file, valid
from nxdt_core.errors.data import BadTokenizerConfig, BadTokenizerFile
from nxdt_core.protocols.tokenizer import LocatedIds, Tokenizer

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that splits text for Llama 3, from its ``tokenizer.json``."""

_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


_RESERVED = (f"<|reserved_special_token_{number}|>" for number in range(256))
LLAMA_3_SPECIAL_TOKENS = tuple(_NAMED.get(place) or next(_RESERVED) for place in range(256))
"""Special tokens of Llama 3.1 and later, from their ``tokenizer.json``; Llama 3 has reserved ones at 4, 8 and 10."""

_SPACES = re.compile(r"\s{10000}")
"""The library's regular expressions give up on a run of some hundred thousand spaces."""


class TiktokenTokenizer(Tokenizer):
    """Wraps ``tiktoken.Encoding``. A text that spells out a special token has that token, as in transformers.

    Raises:
        TokenizerLibraryMissing: tiktoken is not installed.
        TokenizerFileNotFound: there is no such file.
        BadTokenizerFile: the file is not a list of ranks.
        BadTokenizerConfig: the pattern is none, or a key names a token that is not a special token.
    """

    def __init__(self, config: TiktokenTokenizerConfig) -> None:
        library = import_library("tiktoken", tokenizer="tiktoken", extra="tiktoken")
        self._content = read_file(config.model, key="data.tokenizer.model", wanted="file of BPE ranks")
        self._ranks = _parse(self._content, config.model)
        self._pattern = LLAMA_3_PATTERN if config.pattern is None else config.pattern
        names = LLAMA_3_SPECIAL_TOKENS if config.special_tokens is None else config.special_tokens
        self._special = {token: number for number, token in enumerate(names, start=len(self._ranks))}
        if len(self._special) < len(names):
            raise BadTokenizerConfig(key="data.tokenizer.special_tokens", reason="a token is named twice")
        try:
            self._encoding = library.Encoding(
                "nxdt", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens=self._special
            )
        except ValueError as error:
            raise BadTokenizerConfig(key="data.tokenizer.pattern", reason=f"no pattern ({error})") from error
        self.vocab_size: int = len(self._ranks) + len(self._special)
        self.bos_id: int | None = self._named("bos_token", config.bos_token, "<|begin_of_text|>")
        self.eos_id: int | None = self._named("eos_token", config.eos_token, "<|end_of_text|>")
        self.pad_id: int | None = self._named("pad_token", config.pad_token, "<|finetune_right_pad_id|>")
        self._fingerprint = digest("tiktoken", self._content, self._pattern, names, self.bos_id, self.eos_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; a lone surrogate, which UTF-8 cannot express, becomes U+FFFD."""
        try:
            ids: list[int] = self._encoding.encode(text, allowed_special="all")
        except ValueError:
            ids = []
            for begin, end in pairwise((0, *(match.end() for match in _SPACES.finditer(text)), len(text))):
                ids += self._encoding.encode(text[begin:end], allowed_special="all")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the same for many texts, on as many threads as this process may use."""
        threads = len(os.sched_getaffinity(0))
        try:
            encoded: list[list[int]] = self._encoding.encode_batch(
                list(texts), allowed_special="all", num_threads=threads
            )
        except ValueError:
            encoded = [self.encode(text) for text in texts]
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens and ids that are not in the vocabulary are left out."""
        text: str = self._encoding.decode([i for i in ids if 0 <= i < len(self._ranks)])
        return text

    def special_tokens(self) -> Mapping[str, str]:
        """Return the begin, end and padding token, where they exist."""
        names = {id_: token for token, id_ in self._special.items()}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {key: names[id_] for key, id_ in ids.items() if id_ is not None}

    def reserved_tokens(self) -> Sequence[str]:
        """Return all special tokens."""
        return list(self._special)

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of :meth:`encode_batch` with positions; tokens that share a character have the same
        position."""
        spelled = self._encoding.decode_tokens_bytes
        encoded = zip(texts, self.encode_batch(texts), strict=True)
        return [located(valid(text), ids, [len(token) for token in spelled(ids)]) for text, ids in encoded]

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of :meth:`decode`, special tokens included."""
        text: str = self._encoding.decode([i for i in ids if 0 <= i < self.vocab_size])
        return text

    def fingerprint(self) -> str:
        """Digest of the file, the pattern, and the special tokens."""
        return self._fingerprint

    def hf_files(self) -> Mapping[str, bytes]:
        """Return the ``tokenizer.json`` that transformers' own converter makes of the ranks, and the special tokens'
        names."""
        converting = import_library("transformers.convert_slow_tokenizer", tokenizer="tiktoken", extra="huggingface")
        converter = converting.TikTokenConverter(pattern=self._pattern, extra_special_tokens=list(self._special))
        converter.load_tiktoken_bpe = lambda _: self._ranks  # its own keeps a copy by path, however the file changes
        absent = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
        record = {**FAST_TOKENIZER, "clean_up_tokenization_spaces": False, **absent, **self.special_tokens()}
        return {
            "tokenizer.json": converter.converted().to_str().encode(),
            "tokenizer_config.json": json.dumps(record, indent=2).encode(),
        }

    def _named(self, key: str, configured: str | None, usual: str) -> int | None:
        if configured is not None and configured not in self._special:
            raise BadTokenizerConfig(key=f"data.tokenizer.{key}", reason=f"{configured!r} is not a special token")
        return self._special.get(usual if configured is None else configured)


def _parse(content: bytes, path: Path) -> dict[bytes, int]:
    """Ranks by token. What the library takes for granted is looked at: it ends the process where it does not hold."""
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise BadTokenizerFile(path=str(path), wanted="file of BPE ranks", reason=str(error)) from error
    reason = None
    if not ranks:
        reason = "it is empty"
    elif sorted(ranks.values()) != list(range(len(ranks))):
        reason = "its ranks are not 0, 1, 2, …"
    elif missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        reason = f"{missing} of the 256 bytes have no rank"
    if reason is not None:
        raise BadTokenizerFile(path=str(path), wanted="file of BPE ranks", reason=reason)
    return ranks
