"""Tokenizers of a SentencePiece model file (Kudo & Richardson 2018, arXiv:1808.06226)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nxdt_core.builtins.tokenizer_config import SentencePieceTokenizerConfig
from nxdt_core.builtins.tokenizer_files import import_library, not_found
from nxdt_core.data.digest import digest
from nxdt_core.errors import BadTokenizerFile

__all__ = ["SentencePieceTokenizer"]


class SentencePieceTokenizer:
    """Wraps ``sentencepiece.SentencePieceProcessor``.

    Raises:
        TokenizerLibraryMissing: sentencepiece is not installed.
        TokenizerFileNotFound: there is no such file.
        BadTokenizerFile: the file is no SentencePiece model.
    """

    def __init__(self, config: SentencePieceTokenizerConfig) -> None:
        library = import_library("sentencepiece", tokenizer="sentencepiece", extra="sentencepiece")
        content = _read(config.model)
        self._processor = _parse(library, content, config.model)
        self._content = content
        self._fingerprint = digest("sentencepiece", content)
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int | None = _known(self._processor.bos_id())
        self.eos_id: int | None = _known(self._processor.eos_id())
        self.pad_id: int | None = _known(self._processor.pad_id())

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, normalised as the model's trainer was told; no special tokens are added."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for many texts, on the library's threads."""
        ids: list[list[int]] = self._processor.encode(list(texts))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; control tokens and ids that are not in the vocabulary are left out."""
        text: str = self._processor.decode([i for i in ids if 0 <= i < self.vocab_size])
        return text

    def fingerprint(self) -> str:
        """Digest of the model file."""
        return self._fingerprint

    def hf_files(self) -> Mapping[str, bytes]:
        """The model file, and what makes transformers take its Llama tokenizer for it; nothing for a model that this
        tokenizer would read otherwise than SentencePiece does: a unigram one, or one that merges spaces. (Of text that
        begins with a space, transformers 5 drops one.)"""
        pieces = (i for i in range(self.vocab_size) if not self._is_special(i))
        merges = all(self._processor.get_score(i).is_integer() for i in pieces)  # ranks; of unigrams: log-probabilities
        if not merges or self.encode("a  b") == self.encode("a b"):
            return {}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        record = {
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": self._processor.id_to_piece(self._processor.unk_id()),
            **{key: None if id_ is None else self._processor.id_to_piece(id_) for key, id_ in ids.items()},
            "add_bos_token": False,
            "add_eos_token": False,
            "legacy": True,
        }
        return {"tokenizer.model": self._content, "tokenizer_config.json": json.dumps(record, indent=2).encode()}

    def _is_special(self, id_: int) -> bool:
        kinds = (self._processor.is_control, self._processor.is_unknown, self._processor.is_byte)
        return any(is_kind(id_) for is_kind in kinds)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise not_found(path, key="data.tokenizer.model", wanted="SentencePiece model file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadTokenizerFile(path=str(path), wanted="readable file", reason=error.strerror or str(error)) from error


def _parse(library: Any, content: bytes, path: Path) -> Any:
    # An empty model is "valid" to the library, whose first call then fails.
    try:
        processor = library.SentencePieceProcessor(model_proto=content) if content else None
    except (RuntimeError, OSError) as error:
        raise BadTokenizerFile(path=str(path), wanted="SentencePiece model", reason=str(error)) from error
    if processor is None or processor.vocab_size() < 1:
        raise BadTokenizerFile(path=str(path), wanted="SentencePiece model", reason="it holds no vocabulary")
    return processor


def _known(token_id: int) -> int | None:
    """SentencePiece reports −1 for a special token that the model does not have."""
    return token_id if token_id >= 0 else None
