"""Tokenizers of a SentencePiece model file (Kudo & Richardson 2018, arXiv:1808.06226)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
