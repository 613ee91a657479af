"""The section ``data.tokenizer`` of each built-in tokenizer. No torch, no tokenizer library.

The keys are those of NxD Training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from nxdt_core.config.section import Section


class ByteTokenizerConfig(Section):
    """``library: byte`` has nothing to set."""


class HuggingFaceTokenizerConfig(Section):
    """``library: huggingface``: one of ``model``, ``type``, or ``vocab_file`` with ``merge_file``."""

    model: Path | None = None
    """A ``tokenizer.json``, a directory as ``save_pretrained`` writes it, or a model of the Hugging Face hub
    (``hf:owner/name``)."""
    type: str | None = None
    """Name of a pretrained tokenizer on the Hugging Face hub, or a path as in ``model`` (there, a relative path
    starts at the working directory)."""
    vocab_file: Path | None = None
    """``vocab.json`` of a byte-level BPE tokenizer such as GPT-2's; goes with ``merge_file``."""
    merge_file: Path | None = None
    """``merges.txt`` of the same tokenizer."""
    bos_token: str | None = None
    """Begin-of-text token, such as ``"<s>"``; null takes what the tokenizer's files say."""
    eos_token: str | None = None
    """End-of-text token; null takes what the tokenizer's files say."""
    pad_token: str | None = None
    """Padding token; null takes what the tokenizer's files say."""
    added_tokens: tuple[str, ...] = ()
    """Tokens to add to the vocabulary, in this order; those that it has already keep their ids. ``bos_token``,
    ``eos_token`` and ``pad_token`` may name one, which makes it special. ``model.vocab_size`` must have a row for each.
    Rows that the weights of ``checkpoint.resume_from`` lack start as the mean of theirs."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        if "" in self.added_tokens or len({*self.added_tokens}) < len(self.added_tokens):
            yield "added_tokens", "a token is empty or there twice"
        sources = [key for key in ("model", "type", "vocab_file") if getattr(self, key) is not None]
        if (self.vocab_file is None) != (self.merge_file is None):
            yield "merge_file" if self.merge_file is None else "vocab_file", "vocab_file and merge_file go together"
        elif not sources:
            yield "model", "no tokenizer is named; give a tokenizer.json or a directory, or a hub name under 'type'"
        if len(sources) > 1:
            yield sources[1], f"{' and '.join(sources)} each name a tokenizer; keep one"


class MegatronTokenizerConfig(Section):
    """``library: megatron``: the byte-level BPE tokenizer of GPT-2, from the two files that Megatron-LM takes."""

    type: Literal["GPT2BPETokenizer"] = "GPT2BPETokenizer"
    """Megatron-LM's name of the tokenizer."""
    vocab_file: Path
    """``vocab.json``."""
    merge_file: Path
    """``merges.txt``."""
    bos_token: str | None = None
    """Begin-of-text token; null takes ``<|endoftext|>``, where the vocabulary has it."""
    eos_token: str | None = None
    """End-of-text token; null takes ``<|endoftext|>``, where the vocabulary has it."""
    pad_token: str | None = None
    """Padding token; null: none."""


class SentencePieceTokenizerConfig(Section):
    """``library: sentencepiece``."""

    model: Path
    """The ``.model`` file that SentencePiece's trainer wrote."""
    sentencepiece_legacy: bool = False
    """Append tokens to the vocabulary: those that the keys below name and the model lacks, as NeMo's legacy mode does.
    Texts may contain them literally; the text between them is tokenised separately."""
    special_tokens: tuple[str, ...] = ()
    """Further tokens to append, in this order, after ``bos_token``, ``eos_token`` and ``pad_token``."""
    bos_token: str | None = None
    """Begin-of-text token; null takes the model's."""
    eos_token: str | None = None
    """End-of-text token; null takes the model's."""
    pad_token: str | None = None
    """Padding token; null takes the model's."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any model, as (key, message)."""
        if self.special_tokens and not self.sentencepiece_legacy:
            yield "special_tokens", "only sentencepiece_legacy: true appends tokens; set it, or take the key out"
        if "" in (*self.special_tokens, self.bos_token, self.eos_token, self.pad_token):
            yield "special_tokens", "a token cannot be empty"


class TiktokenTokenizerConfig(Section):
    """``library: tiktoken``: byte-level BPE from a file of ranks, such as Llama 3's ``tokenizer.model``."""

    model: Path
    """A file whose lines are a token in base64 and its rank."""
    pattern: str | None = None
    """Regular expression that cuts texts into words; null takes that of Llama 3."""
    special_tokens: tuple[str, ...] | None = None
    """Tokens behind those of the file, in this order; null takes the 256 of Llama 3.1."""
    bos_token: str | None = None
    """Begin-of-text token; null takes ``<|begin_of_text|>``, where it is a special token."""
    eos_token: str | None = None
    """End-of-text token; null takes ``<|end_of_text|>``, where it is a special token."""
    pad_token: str | None = None
    """Padding token; null takes ``<|finetune_right_pad_id|>``, where it is a special token."""
