"""Several sources: shares, passes, order, and each source alone."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from nxdt_testing.dataset_contract import take_steps
from nxdt_testing.errors import raises

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.errors.data import MixtureInSequence


@pytest.fixture
def sources(saved, tmp_path):
    """Three sources of 5, 20 and 50 samples, whose tokens say which they are."""
    sizes = {"a": 5, "b": 20, "c": 50}
    rows = {name: [[start + i] * 8 for i in range(sizes[name])] for name, start in (("a", 0), ("b", 50), ("c", 100))}
    return {name: {"train_dir": saved(tmp_path / name, rows[name])} for name in sizes}


def weighted(sources, **weights):
    return {name: {**sources[name], "weight": weight} for name, weight in weights.items()}


def drawn(dataset, count, rank=0, size=1, state=None, seed=3, workers=0):
    """First tokens of the samples of ``count`` steps of 10, and the state behind them."""
    found, behind = take_steps(
        dataset, count, global_batch_size=10, seed=seed, rank=rank, size=size, state=state, workers=workers
    )
    return [[int(batch.input_ids[0, 0]) for batch in batches] for batches in found], behind


def share(tokens, low, high):
    return sum(low <= token < high for token in tokens) / len(tokens)


@pytest.mark.parametrize("streaming", [False, True])
def test_shares_are_those_of_the_weights_and_every_sample_comes(loader, sources, streaming):
    """Over ten passes of the mixture, each of which repeats a quarter of one source."""
    mixed = loader(sources=weighted(sources, a=1, b=1, c=2), streaming=streaming, shuffle=not streaming).split("train")
    steps, _ = drawn(mixed, 100)
    tokens = [token for step in steps for token in step]
    assert share(tokens, 0, 50) == pytest.approx(0.25, abs=0.002)
    assert share(tokens, 100, 200) == pytest.approx(0.5, abs=0.002)
    counts = Counter(tokens)
    assert len(counts) == 75
    for low, high in ((0, 5), (50, 70), (100, 150)):  # no sample is preferred within its source
        assert np.ptp([counts[token] for token in range(low, high)]) <= 1


def test_a_pass_is_as_long_as_the_source_that_needs_most(loader, sources):
    assert len(loader(sources=weighted(sources, a=1, b=1, c=2)).split("train")) == 25 + 25 + 50
    assert len(loader(sources=weighted(sources, a=98, c=2)).split("train")) == 2450 + 50
    assert len(loader(sources=weighted(sources, b=3)).split("train")) == 20


@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_is_the_seeds_and_goes_on_on_other_ranks(loader, sources, streaming):
    def mixed(seed=3):
        section = weighted(sources, a=1, b=2, c=2)
        return loader(sources=section, seed=seed, streaming=streaming, shuffle_block=7).split("train")

    whole, _ = drawn(mixed(), 12)
    assert whole == drawn(mixed(), 12, workers=3)[0]
    assert whole != drawn(mixed(seed=4), 12, seed=4)[0]
    for stop in (1, 5, 11):
        _, state = drawn(mixed(), stop, workers=2)
        ranks = [drawn(mixed(), 12 - stop, rank, 2, state, workers=rank)[0] for rank in range(2)]
        assert [first + second for first, second in zip(*ranks, strict=True)] == whole[stop:]


def test_sources_in_sequence_are_refused_unless_they_are_streams(loader, sources):
    section = weighted(sources, a=1, b=1)
    with raises(MixtureInSequence, match=r"'a', 'b'[\s\S]*data\.shuffle"):
        loader(sources=section, shuffle=False).split("train")
    stream = loader(sources=section, shuffle=False, streaming=True).split("train")
    assert [int(sample.input_ids[0]) for sample in islice(stream, 6)] == [0, 50, 1, 51, 2, 52]


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_takes_every_source_once_and_tells_them_apart(loader, sources, streaming):
    section = {name: {**source, "val_dir": source["train_dir"], "weight": 9} for name, source in sources.items()}
    section["a"]["val_dir"] = None
    sets = loader(sources=section, streaming=streaming).split("validation")
    assert list(sets) == ["b", "c"]
    for name, expected in (("b", range(50, 70)), ("c", range(100, 150))):
        one_pass = GlobalBatchLoader(
            sets[name], global_batch_size=7, micro_batch_size=7, seed=1, shuffle=False, repeat=False
        )
        for _ in range(2):  # each iteration is a pass of its own
            rows = [row for (batch,) in one_pass for row in zip(batch.input_ids, batch.labels, strict=True)]
            assert [int(tokens[0]) for tokens, labels in rows if labels.max() >= 0] == [*expected]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_fingerprint_knows_weights_and_sources(loader, sources, streaming):
    variants = ({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"b": 1, "a": 1}, {"a": 1, "c": 1}, {"a": 1})
    found = [loader(sources=weighted(sources, **v), streaming=streaming).split("train").fingerprint() for v in variants]
    assert len(set(found)) == len(found)
    again = loader(sources=weighted(sources, a=1, b=1), streaming=streaming).split("train").fingerprint()
    assert again == found[0]
