"""Text as its UTF-8 bytes: ids 0 to 255 and three special tokens. Needs no files, knows every script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nxdt_core.protocols.tokenizer import LocatedIds, Tokenizer

if TYPE_CHECKING:  # `nxdt config check` asks for the size of the vocabulary, and imports no numpy
    import numpy as np
    from numpy.typing import NDArray

_BYTES = 256
_SPELLED = {_BYTES: "<bos>", _BYTES + 1: "<eos>", _BYTES + 2: "<pad>"}


class ByteTokenizer(Tokenizer):
    """Tokenizer whose tokens are the bytes of UTF-8: ``ByteTokenizer(config).encode("hi") == [104, 105]``."""

    vocab_size: int = _BYTES + 3
    bos_id: int | None = _BYTES
    eos_id: int | None = _BYTES + 1
    pad_id: int | None = _BYTES + 2

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``; a lone surrogate, which UTF-8 cannot express, becomes a question mark."""
        return list(text.encode("utf-8", "replace"))

    def encode_to_arrays(self, texts: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
        """Yield the same in arrays of one byte per token, a hundred times as fast."""
        import numpy as np

        return (np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < _BYTES).decode("utf-8", "replace")

    def locate(self, texts: Sequence[str]) -> list[LocatedIds]:
        """Return the ids of :meth:`encode` with their positions; the bytes of a character share its position."""
        from nxdt_core.data.tokenizers.files import located

        valid = [text.encode("utf-8", "replace").decode() for text in texts]
        return [located(text, ids, [1] * len(ids)) for text, ids in zip(valid, map(self.encode, valid), strict=True)]

    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of :meth:`decode`, with special tokens as ``<bos>``, ``<eos>`` and ``<pad>``."""
        runs = groupby(ids, _SPELLED.__contains__)
        return "".join("".join(_SPELLED[id_] for id_ in run) if special else self.decode(run) for special, run in runs)

    def fingerprint(self) -> str:
        """Return the name of the rule; there is no vocabulary to digest."""
        return "byte-1"
