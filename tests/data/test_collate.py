"""Samples become tensors; absent optional fields mean what they mean alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nxdt_core.data.collate import blank_like, collate, count_loss_tokens
from nxdt_core.errors import EmptyDataset, MixedSamples
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
    assert batch.loss_weights.dtype == torch.float32


def test_loss_tokens_are_counted_over_micro_batches_whatever_their_weight():
    weighted = sample(loss_weights=np.array([0.5, 0.25, 1.0], np.float32))
    assert count_loss_tokens([collate([sample(), sample()]), collate([weighted])]) == 6


def test_a_blank_sample_has_the_shape_but_no_weight():
    fields = {"position_ids": np.array([0, 1, 2]), "loss_weights": np.ones(3, np.float32)}
    batch = collate([blank_like(sample(**fields))])
    assert batch.weight() == 0
    assert batch.loss_weights.sum() == 0
    assert batch.position_ids.tolist() == [[0, 1, 2]]


def test_samples_of_different_lengths_are_refused_with_the_lengths():
    short = Sample(input_ids=np.array([1]), labels=np.array([2]))
    with pytest.raises(MixedSamples, match=r"\(3, 1\)"):
        collate([sample(), short])


def test_no_samples_are_refused():
    with pytest.raises(EmptyDataset):
        collate([])
