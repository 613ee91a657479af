"""Characters of sums to ids."""

from collections.abc import Iterable

from nxdt_core.protocols.tokenizer import Tokenizer

_SYMBOLS = "0123456789+=\n"


class DigitTokenizer(Tokenizer):
    """One id a character; characters that it does not know are left out."""

    vocab_size = len(_SYMBOLS) + 1
    bos_id = None
    eos_id = len(_SYMBOLS)
    pad_id = None

    def __init__(self, config: None = None) -> None:
        self._ids = {symbol: index for index, symbol in enumerate(_SYMBOLS)}

    def encode(self, text: str) -> list[int]:
        """Ids of the characters."""
        return [self._ids[symbol] for symbol in text if symbol in self._ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Characters of the ids; the end of text is left out."""
        return "".join(_SYMBOLS[index] for index in ids if 0 <= index < len(_SYMBOLS))

    def fingerprint(self) -> str:
        """Return the name of the vocabulary, which is the symbols."""
        return f"digits-{len(_SYMBOLS)}"
