"""Tokenised documents end to end in one compact array: what packing cuts into samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nxdt_core.errors.data import SpecialTokenMissing
from nxdt_core.protocols.tokenizer import Tokenizer

_BATCH = 256
"""Documents given to a tokenizer at once: enough for the threads of its library."""


class TokenArray(Protocol):
    """Integers that are sliced like a numpy array, which is one; others may read files piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Documents in order, without gaps."""

    tokens: TokenArray
    """[tokens]; of :func:`tokenize`: the smallest of uint8, uint16 and uint32 that holds the vocabulary."""
    starts: NDArray[np.int64]
    """[documents] places of the first token of each document; ascending, the first is 0. Empty for no tokens."""
    weights: NDArray[np.float32] = field(default_factory=lambda: np.ones(0, np.float32))
    """[documents] weight of each document's tokens in the loss; [0] where all have 1."""

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple[TokenStream, TokenStream]:
        """Return the tokens before and from ``at``; a document that is cut becomes two."""
        before, inner = self.starts[self.starts < at], self.starts[self.starts > at] - at
        head = np.zeros(1 if at < len(self) else 0, dtype=np.int64)
        after = np.concatenate([head, inner])
        first = TokenStream(tokens=self.tokens[:at], starts=before, weights=self.weights[: len(before)])
        rest = self.weights[len(self.weights) - len(after) :] if len(self.weights) else self.weights
        return first, TokenStream(tokens=self.tokens[at:], starts=after, weights=rest)


def compact_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned type for the ids below ``vocab_size``."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


def tokenize(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    weights: Sequence[float] = (),
) -> TokenStream:
    """Tokenise documents, with ``bos_id`` before and ``eos_id`` after each where they are given.

    Documents that yield no tokens are left out, together with their special tokens. ``weights`` has one for each
    document at the end of ``documents``, or none.
    """
    parts: list[NDArray[np.unsignedinteger]] = []
    used: list[int] = []
    for number, ids in enumerate(encode_documents(documents, tokenizer, bos_id=bos_id, eos_id=eos_id)):
        if len(ids):
            used.append(number)
            parts.append(ids)
    tokens = np.concatenate([np.empty(0, compact_dtype(tokenizer.vocab_size)), *parts])
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)[: len(parts)]
    weighted = [weights[number] for number in used] if any(weight != 1 for weight in weights) else []
    return TokenStream(tokens=tokens, starts=starts, weights=np.array(weighted, np.float32))


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, *, bos_id: int | None = None, eos_id: int | None = None
) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yield the ids of each document, of :func:`compact_dtype`, with ``bos_id`` before and ``eos_id`` after them where
    they are given; an empty array for a document without tokens."""
    dtype = compact_dtype(tokenizer.vocab_size)
    head, tail = (np.array([] if id_ is None else [id_], dtype) for id_ in (bos_id, eos_id))
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH)):
        for ids in tokenizer.encode_to_arrays(batch):
            yield np.concatenate([head, ids, tail], dtype=dtype, casting="unsafe") if len(ids) else np.empty(0, dtype)


def leading_ids(tokenizer: Tokenizer, *, add_bos: bool = False) -> list[int]:
    """Return the tokens that a text begins with: those that the tokenizer's files put first, as in transformers.

    Args:
        tokenizer: of the run.
        add_bos: ``data.add_bos``: put the begin token first where the files do not.

    Raises:
        SpecialTokenMissing: the tokenizer does not have one.
    """
    leading = list(tokenizer.leading_ids())
    if not add_bos or tokenizer.bos_id in leading:
        return leading
    if tokenizer.bos_id is None:
        raise SpecialTokenMissing(key="data.add_bos", token="begin of text")
    return [tokenizer.bos_id, *leading]


def text_ids(text: str, tokenizer: Tokenizer, *, add_bos: bool = False) -> list[int]:
    """Return the ids of a prompt behind its :func:`leading_ids`."""
    return with_leading(tokenizer.encode(text), leading_ids(tokenizer, add_bos=add_bos))


def with_leading(ids: Sequence[int], leading: Sequence[int]) -> list[int]:
    """Return the ids of a text behind ``leading``, unless it begins with them already."""
    return [*ids] if [*ids[: len(leading)]] == [*leading] else [*leading, *ids]


def padding_id(tokenizer: Tokenizer) -> int:
    """Return what sequences are filled up with. The loss is never on padding, nor does a token see it: any id does
    where the tokenizer has none."""
    return next((id_ for id_ in (tokenizer.pad_id, tokenizer.eos_id) if id_ is not None), 0)
