"""The tokenizer keeps what nxdt asks of every tokenizer."""

from collections.abc import Callable

import pytest
from acme_nxdt.tokenizer import DigitTokenizer
from nxdt_testing.tokenizer_contract import TokenizerContract

from nxdt_core.protocols.tokenizer import Tokenizer


class TestDigits(TokenizerContract):
    """All tests are inherited."""

    texts = ("12+30=42", "7")
    every_text = False

    @pytest.fixture
    def make(self) -> Callable[[], Tokenizer]:
        """Nothing of it can be configured."""
        return lambda: DigitTokenizer(None)
