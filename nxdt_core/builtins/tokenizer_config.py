"""The section ``data.tokenizer`` of each built-in tokenizer. No torch, no tokenizer library."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ByteTokenizerConfig", "HuggingFaceTokenizerConfig", "SentencePieceTokenizerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizerConfig:
    """``library: byte`` has nothing to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTokenizerConfig:
    """``library: huggingface``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceTokenizerConfig:
    """``library: sentencepiece``."""
