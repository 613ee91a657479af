"""Samples cut from documents: checked against a slow reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.data.packing import PackedDataset, Packing
from nxdt_core.data.tokens import TokenStream
from nxdt_core.protocols.batch import IGNORE_INDEX

APART = Packing()
TOGETHER = Packing(reset_attention_mask=False, reset_position_ids=False)


def stream(*lengths):
    """Documents of these lengths; each token is its place in the stream."""
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    return TokenStream(tokens=np.arange(starts[-1], dtype=np.uint16), starts=starts[:-1])


def dataset(tokens, seq_length, packing=APART):
    return PackedDataset(tokens, seq_length=seq_length, packing=packing)


def test_labels_are_the_next_tokens_and_each_token_is_a_label_once():
    samples = [dataset(stream(13), 4, TOGETHER)[i] for i in range(3)]
    assert [s.input_ids.tolist() for s in samples] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [s.labels.tolist() for s in samples] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_only_whole_windows_of_seq_length_plus_one_are_samples(tokens, samples):
    assert len(dataset(stream(tokens), 4)) == samples


def test_documents_are_numbered_and_positions_restart():
    sample = dataset(stream(3, 2, 20), 8)[0]
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert sample.labels.tolist() == [1, 2, IGNORE_INDEX, 4, IGNORE_INDEX, 6, 7, 8]
    assert sample.input_ids.tolist() == list(range(8))


def test_a_window_within_a_document_starts_a_numbering_of_its_own():
    sample = dataset(stream(10, 10), 4)[1]
    assert sample.document_ids.tolist() == [0, 0, 0, 0]
    assert sample.position_ids.tolist() == [0, 1, 2, 3]


def test_a_document_that_starts_at_the_last_label_is_not_predicted():
    assert dataset(stream(4, 9), 4)[0].labels.tolist() == [1, 2, 3, IGNORE_INDEX]


def test_documents_that_may_see_each_other_say_nothing_of_themselves():
    sample = dataset(stream(3, 2, 20), 8, TOGETHER)[0]
    assert sample.document_ids is None
    assert sample.position_ids is None
    assert sample.labels.tolist() == list(range(1, 9))


def test_a_single_document_needs_neither_numbering_nor_positions():
    sample = dataset(stream(30), 8)[0]
    assert sample.document_ids is None
    assert sample.position_ids is None


def test_all_samples_of_a_dataset_have_the_same_fields():
    packed = dataset(stream(3, 100), 8)
    assert {packed[i].document_ids is None for i in range(len(packed))} == {False}


def test_positions_after_the_end_of_document_token_can_be_left_out_of_the_loss():
    tokens = TokenStream(tokens=np.array([1, 2, 9, 3, 9, 4, 5], np.uint16), starts=np.array([0]))
    packing = Packing(reset_attention_mask=False, eod_id=9)
    assert dataset(tokens, 6, packing)[0].labels.tolist() == [2, 9, IGNORE_INDEX, 9, IGNORE_INDEX, 5]


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError):
        dataset(stream(13), 4)[index]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_sample_follows_the_definition(lengths, seq_length):
    document_of = [document for document, length in enumerate(lengths) for _ in range(length)]
    packed = dataset(stream(*lengths), seq_length)
    for index in range(len(packed)):
        begin = index * seq_length
        documents = document_of[begin : begin + seq_length + 1]
        sample = packed[index]
        for place in range(seq_length):
            first = documents.index(documents[place])
            assert sample.document_ids[place] == documents[place] - documents[0]
            assert sample.position_ids[place] == place - first
            follows = documents[place + 1] == documents[place]
            assert sample.labels[place] == (begin + place + 1 if follows else IGNORE_INDEX)


def test_the_fingerprint_knows_tokens_borders_length_and_packing():
    tokens = stream(6, 7)
    changed = TokenStream(tokens=tokens.tokens[::-1].copy(), starts=tokens.starts)
    variants = [
        dataset(tokens, 4),
        dataset(tokens, 3),
        dataset(tokens, 4, TOGETHER),
        dataset(changed, 4),
        dataset(stream(7, 6), 4),
        PackedDataset(tokens, seq_length=4, source="a"),
        PackedDataset(tokens, seq_length=4, source="b"),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
    assert dataset(stream(6, 7), 4).fingerprint() == variants[0].fingerprint()
