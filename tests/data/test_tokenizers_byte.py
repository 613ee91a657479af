"""The byte tokenizer: every text comes back, special tokens stay out."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import ByteTokenizerConfig
from nxdt_core.protocols.tokenizer import Tokenizer

tokenizer = ByteTokenizer(ByteTokenizerConfig())


def test_ids_are_bytes_and_special_tokens_follow():
    assert tokenizer.encode("hi") == [104, 105]
    assert tokenizer.encode("€") == [0xE2, 0x82, 0xAC]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)


@settings(deadline=None)
@given(st.text())
def test_every_text_comes_back(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.text(), max_size=5))
def test_a_batch_equals_its_texts(texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@settings(deadline=None)
@given(st.lists(st.integers(-5, 300)))
def test_any_ids_decode_to_some_text(ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_special_tokens_and_broken_characters_do_not_disturb_decoding():
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"
    assert tokenizer.decode([104, 0xE2, 0x82, 105]) == "h\ufffdi"


def test_what_utf8_cannot_express_becomes_a_question_mark():
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_it_looks_like_a_tokenizer_and_imports_no_torch():
    assert isinstance(tokenizer, Tokenizer)
    program = "import sys; sys.modules['torch'] = None; import nxdt_core.data.tokenizers.byte"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
