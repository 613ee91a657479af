"""The section ``data.tokenizer`` of each built-in tokenizer. No torch, no tokenizer library.

The keys are those of NxD Training. ``delimiter``, of its tabular tokenizer, is unknown to all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ByteTokenizerConfig", "HuggingFaceTokenizerConfig", "SentencePieceTokenizerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizerConfig:
    """``library: byte`` has nothing to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTokenizerConfig:
    """``library: huggingface``: one of ``model``, ``type``, or ``vocab_file`` with ``merge_file``."""

    model: Path | None = None
    """A ``tokenizer.json``, or a directory as ``save_pretrained`` writes it."""
    type: str | None = None
    """Name of a pretrained tokenizer on the Hugging Face hub, or a path as in ``model`` (there, a relative path
    starts at the working directory)."""
    vocab_file: Path | None = None
    """``vocab.json`` of a byte-level BPE tokenizer such as GPT-2's; goes with ``merge_file``."""
    merge_file: Path | None = None
    """``merges.txt`` of the same tokenizer."""
    use_fast: bool = True
    """Only ``true``: the slow tokenizers written in Python are not supported."""
    bos_token: str | None = None
    """Begin-of-text token, such as ``"<s>"``; null takes what the tokenizer's files say."""
    eos_token: str | None = None
    """End-of-text token; null takes what the tokenizer's files say."""
    pad_token: str | None = None
    """Padding token; null takes what the tokenizer's files say."""

    def check(self) -> Iterator[tuple[str, str]]:
        """What cannot work whatever the files hold, as (key, message)."""
        sources = [key for key in ("model", "type", "vocab_file") if getattr(self, key) is not None]
        if (self.vocab_file is None) != (self.merge_file is None):
            yield "merge_file" if self.merge_file is None else "vocab_file", "vocab_file and merge_file go together"
        elif not sources:
            yield "model", "no tokenizer is named; give a tokenizer.json or a directory, or a hub name under 'type'"
        if len(sources) > 1:
            yield sources[1], f"{' and '.join(sources)} each name a tokenizer; keep one"
        if not self.use_fast:
            yield "use_fast", "only fast tokenizers are supported; take the key out or set it to true"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceTokenizerConfig:
    """``library: sentencepiece``."""

    model: Path
    """The ``.model`` file that SentencePiece's trainer wrote."""
