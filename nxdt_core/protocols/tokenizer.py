"""Kind ``tokenizer``: text to ids and back. Torch-free; the target is called as ``Target(config)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["HFTokenizer", "Tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
    """Example: ``ByteTokenizer(config).encode("hi") == [104, 105]``."""

    vocab_size: int
    """One more than the highest id, special tokens included."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    def __init__(self, config: Any) -> None: ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without special tokens at its ends."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for many texts; libraries with threads use them."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens are left out."""
        ...

    def fingerprint(self) -> str:
        """Short digest of vocabulary and rules; part of a dataset's fingerprint."""
        ...


@runtime_checkable
class HFTokenizer(Protocol):
    """Optional for a tokenizer: one that transformers can load."""

    def hf_files(self) -> Mapping[str, bytes]:
        """The files, by name, that ``AutoTokenizer.from_pretrained`` makes the same tokenizer of."""
        ...
