"""Kind ``tokenizer``: text to ids and back. Torch-free; the target is called as ``Target(config)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ChatTokenizer", "HFTokenizer", "LeadingTokenizer", "LocatedIds", "Tokenizer"]


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
        """Return the ids of ``text`` without special tokens at its ends."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the same for many texts; libraries with threads use them."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens are left out."""
        ...

    def fingerprint(self) -> str:
        """Return the short digest of vocabulary and rules; part of a dataset's fingerprint."""
        ...


@runtime_checkable
class HFTokenizer(Protocol):
    """Optional for a tokenizer: one that transformers can load."""

    def hf_files(self) -> Mapping[str, bytes]:
        """Return the files, by name, that ``AutoTokenizer.from_pretrained`` makes the same tokenizer of."""
        ...


@runtime_checkable
class LeadingTokenizer(Protocol):
    """Optional for a tokenizer: one whose files say how a text begins."""

    def leading_ids(self) -> Sequence[int]:
        """Return what transformers would put before each text, such as the begin-of-text token; often nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedIds:
    """Ids of a text and their positions in it, each [tokens]. Positions count characters and never decrease."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Position of each token's first character."""
    ends: NDArray[np.int64]
    """Position after its last character; tokens that share a character have equal starts and equal ends."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """Optional for a tokenizer: what chat data need of it."""

    def chat_template(self) -> str | None:
        """Return the Jinja template that its files bring; None where they bring none."""
        ...

    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token`` and what else a template may name → the token as it is written."""
        ...

    def reserved_tokens(self) -> Sequence[str]:
        """Return every special token as it is written: what becomes one token wherever a text spells it."""
        ...

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of ``encode_batch`` with places; a special token that a text spells out is that token."""
        ...

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` with special tokens as they are written; for people to read."""
        ...
