"""Kind ``tokenizer``: text to ids and back. Torch-free; the target is called as ``Target(config)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxdt_core.errors.chats import NotAChatTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LocatedIds", "Tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedIds:
    """Ids of a text and their positions in it, each [tokens]. Positions count characters and never decrease."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Position of each token's first character."""
    ends: NDArray[np.int64]
    """Position after its last character; tokens that share a character have equal starts and equal ends."""


class Tokenizer(ABC):
    """Example: ``ByteTokenizer(config).encode("hi") == [104, 105]``."""

    vocab_size: int
    """One more than the highest id, special tokens included."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens at its ends."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens are left out."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the short digest of vocabulary and rules; part of a dataset's fingerprint."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts; libraries with threads use them."""
        return [self.encode(text) for text in texts]

    def encode_to_arrays(self, texts: Sequence[str]) -> Iterable[Sequence[int] | NDArray[np.unsignedinteger]]:
        """Return the same for many texts whose ids are put into arrays. Overridden by a tokenizer that has arrays
        without a list."""
        return self.encode_batch(texts)

    def leading_ids(self) -> Sequence[int]:
        """Return what transformers would put before each text, such as the begin-of-text token. Default: nothing."""
        return ()

    def hf_files(self) -> Mapping[str, bytes]:
        """Return the files, by name, that ``AutoTokenizer.from_pretrained`` makes the same tokenizer of. Default: none,
        and exported models come without a tokenizer."""
        return {}

    # Chats.

    def chat_template(self) -> str | None:
        """Return the Jinja template that its files bring; None where they bring none."""
        return None

    def special_tokens(self) -> Mapping[str, str]:
        """Return the mapping from ``bos_token``, ``eos_token`` and what else a template may name to the token as it is
        written."""
        return {}

    def reserved_tokens(self) -> Sequence[str]:
        """Return every special token as it is written: what becomes one token wherever a text spells it."""
        return ()

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` with special tokens as they are written; for people to read. Default:
        :meth:`decode`."""
        return self.decode(ids)

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of ``encode_batch`` with places; a special token that a text spells out is that token.

        Raises:
            NotAChatTokenizer: it does not know places, so that chat data refuse it; the default.
        """
        raise NotAChatTokenizer(tokenizer=type(self).__name__)
