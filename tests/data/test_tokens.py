"""Documents become one compact array with its borders."""

from __future__ import annotations

import numpy as np
import pytest
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokens import compact_dtype, leading_ids, text_ids, tokenize, with_leading
from nxdt_core.errors.data import SpecialTokenMissing
from nxdt_core.protocols.tokenizer import Tokenizer


class WordTokenizer(Tokenizer):
    """Words by first letter, without an array path; says how many texts each call got."""

    vocab_size, bos_id, eos_id, pad_id = 70_000, None, 69_999, None

    def __init__(self):
        self.calls = []

    def encode(self, text):
        raise AssertionError("texts are encoded in batches")

    decode = fingerprint = encode

    def encode_batch(self, texts):
        self.calls.append(len(texts))
        return [[ord(word[0]) for word in text.split()] for text in texts]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_taken(vocab_size, dtype):
    assert compact_dtype(vocab_size) == np.dtype(dtype)


def test_special_tokens_stand_around_each_document():
    stream = tokenize(["ab", "c"], ByteTokenizer(), bos_id=256, eos_id=257)
    assert stream.tokens.tolist() == [256, 97, 98, 257, 256, 99, 257]
    assert stream.starts.tolist() == [0, 4]
    assert stream.tokens.dtype == np.uint16


def test_documents_without_tokens_leave_nothing_behind():
    stream = tokenize(["", "a", "", "b", ""], ByteTokenizer(), eos_id=257)
    assert stream.tokens.tolist() == [97, 257, 98, 257]
    assert stream.starts.tolist() == [0, 2]


def test_no_documents_make_an_empty_stream():
    stream = tokenize([], ByteTokenizer(), eos_id=257)
    assert (len(stream), len(stream.starts)) == (0, 0)


def test_a_tokenizer_without_arrays_gets_documents_in_batches():
    tokenizer = WordTokenizer()
    stream = tokenize((f"a{i} b" for i in range(600)), tokenizer, eos_id=69_999)
    assert stream.tokens.dtype == np.uint32
    assert stream.tokens[:6].tolist() == [97, 98, 69_999] * 2
    assert (len(stream.starts), stream.starts[1]) == (600, 3)
    assert sum(tokenizer.calls) == 600
    assert len(tokenizer.calls) > 1


def test_a_prompt_begins_with_the_begin_token_where_that_is_asked_for():
    assert text_ids("a", ByteTokenizer()) == [97]
    assert text_ids("a", ByteTokenizer(), add_bos=True) == [256, 97]
    assert with_leading([256, 97], [256]) == [256, 97]
    with raises(SpecialTokenMissing, match=r"data\.add_bos"):
        leading_ids(WordTokenizer(), add_bos=True)


def test_the_byte_tokenizer_offers_arrays_that_equal_its_lists():
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_to_arrays(["añ€"])
    assert ids.tolist() == tokenizer.encode("añ€")


@pytest.mark.parametrize("at", range(8))
def test_a_split_shares_no_token_and_loses_none(at):
    whole = tokenize(["ab", "c"], ByteTokenizer(), bos_id=256, eos_id=257)
    first, second = whole.split(at)
    assert [*first.tokens, *second.tokens] == whole.tokens.tolist()
    for part, begin in ((first, 0), (second, at)):
        borders = {0, *(start - begin for start in (0, 4))} if len(part) else set()
        assert part.starts.tolist() == sorted(b for b in borders if 0 <= b < len(part))
