"""Samples become tensors; absent optional fields mean what they mean alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from nxdt_testing.errors import raises

from nxdt_core.data.loader import blank_like, collate
from nxdt_core.errors.data import EmptyDataset, MixedSamples
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample


def sample(**fields):
    return Sample(input_ids=np.array([5, 6, 7]), labels=np.array([6, 7, IGNORE_INDEX]), **fields)


def test_plain_samples_become_int64_tensors_and_no_optional_fields():
    batch = collate([sample(), sample()])
    assert batch.input_ids.tolist() == [[5, 6, 7]] * 2
    assert batch.labels.tolist() == [[6, 7, IGNORE_INDEX]] * 2
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.loss_weights is batch.position_ids is batch.document_ids is None


def test_labels_are_not_shifted_again():
    assert collate([sample()]).labels[0, 0] == 6


def test_compact_token_types_are_widened():
    small = Sample(input_ids=np.array([1, 2], np.uint16), labels=np.array([2, 3], np.uint16))
    assert collate([small]).input_ids.dtype == torch.int64


def test_a_batch_owns_its_memory():
    tokens = np.arange(4)
    batch = collate([Sample(input_ids=tokens[:-1], labels=tokens[1:])])
    tokens[:] = 9
    assert batch.input_ids.tolist() == [[0, 1, 2]]


def test_fields_that_only_some_samples_have_are_filled_with_their_meaning():
    full = sample(
        loss_weights=np.array([0.5, 2.0, 0.0], np.float32),
        position_ids=np.array([0, 0, 1]),
        document_ids=np.array([0, 1, 1]),
    )
    batch = collate([full, sample()])
    assert batch.loss_weights.tolist() == [[0.5, 2.0, 0.0], [1.0, 1.0, 0.0]]
    assert batch.position_ids.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert batch.document_ids.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.padding is None
    assert batch.loss_weights.dtype == torch.float32


def test_a_blank_sample_has_the_shape_but_no_weight():
    fields = {"position_ids": np.array([0, 1, 2]), "loss_weights": np.ones(3, np.float32)}
    batch = collate([blank_like(sample(**fields))])
    assert batch.weight() == 0
    assert batch.loss_weights.sum() == 0
    assert batch.position_ids.tolist() == [[0, 1, 2]]
    assert batch.tokens() == 0


def test_padding_is_what_a_sample_marks_or_else_documents_of_minus_one():
    marked = sample(padding=np.array([False, True, True]), document_ids=np.array([0, 1, -1]))
    filled = sample(document_ids=np.array([0, 1, -1]))
    whole = collate([sample(), sample()])
    assert (whole.padding_mask(), whole.tokens()) == (None, 6)
    for rows, tokens in (([marked, filled, sample(), blank_like(filled)], 1 + 2 + 3), ([filled, sample()], 2 + 3)):
        batch = collate(rows)
        assert (~batch.padding_mask()).sum() == batch.tokens() == tokens


def test_rows_of_one_sample_are_adjacent_rows_of_the_batch():
    pairs = [Sample(input_ids=np.array([[n, 1], [n, 2]]), labels=np.array([[1, -100], [2, -100]])) for n in (7, 8)]
    weighted = replace(pairs[1], loss_weights=np.array([[0.0, 0.5], [1.0, 0.0]], np.float32))
    batch = collate([pairs[0], weighted])
    assert batch.input_ids.tolist() == [[7, 1], [7, 2], [8, 1], [8, 2]]
    assert batch.loss_weights.tolist() == [[1, 0], [1, 0], [0, 0.5], [1, 0]]
    assert (batch.samples, batch.rows_per_sample) == (2, 2)
    assert collate([blank_like(pairs[0])]).weight() == 0
    placed = collate([pairs[0], replace(pairs[1], position_ids=np.array([[0, 0], [0, 1]]))])
    assert placed.position_ids.tolist() == [[0, 1], [0, 1], [0, 0], [0, 1]]


def test_a_batch_that_moves_keeps_every_field():
    log_probs = np.array([-1.0, -2.0, 0.0], np.float32)
    batch = collate([sample(reference_log_probs=log_probs), sample()]).to("cpu")
    assert batch.reference_log_probs.tolist() == [[-1, -2, 0], [0, 0, 0]]
    assert collate([Sample(input_ids=np.zeros((2, 1)), labels=np.zeros((2, 1)))]).to("cpu").rows_per_sample == 2


def test_samples_of_different_lengths_are_refused_with_the_lengths():
    short = Sample(input_ids=np.array([1]), labels=np.array([2]))
    with raises(MixedSamples, match=r"\(3, 1\)"):
        collate([sample(), short])


def test_no_samples_are_refused():
    with raises(EmptyDataset):
        collate([])
