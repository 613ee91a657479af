"""Samples are Megatron-Core's, number for number, and indices are built once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nxdt_plugin_megatron_data.config import read_shares, split_bounds
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens
from nxdt_plugin_megatron_data.loader import (
    IndexedDataset,
    Indices,
    Windows,
    cached_indices,
)

from tests import processes


def walked(lengths, order, seq_length, extra, drop_last):
    """Samples by laying every token out: what the indices must come to."""
    tokens = [(int(which), place) for which in order for place in range(lengths[which])]
    count = Windows(seq_length=seq_length, extra=extra, drop_last=drop_last).count(len(tokens))
    return [tokens[k * seq_length : (k + 1) * seq_length + int(extra)] for k in range(count)]


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("seq_length", [1, 2, 7, 64, 5000])
def test_samples_are_consecutive_tokens_of_the_shuffled_documents(seq_length, drop_last, extra):
    lengths = np.random.default_rng(seq_length).integers(0, 30, 200).astype(np.int32)
    windows = Windows(seq_length=seq_length, extra=extra, drop_last=drop_last)
    indices = windows.build(lengths, range(20, 200), seed=3)
    wanted = walked(lengths, indices.documents, seq_length, extra, drop_last)
    assert sorted(indices.documents) == list(range(20, 200))
    assert sorted(indices.shuffle) == list(range(len(wanted)))
    for number, sample in enumerate(wanted):
        (first, offset), (last, end) = indices.samples[number : number + 2].tolist()
        got = []
        for place in range(first, last + 1):
            which = int(indices.documents[place])
            stop = min(end + int(extra), lengths[which]) if place == last else lengths[which]
            got += [(which, at) for at in range(offset if place == first else 0, stop)]
        assert got == sample


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_sample_index_is_that_of_megatron_core(megatron, drop_last, extra):
    from megatron.core.datasets.helpers import build_sample_idx

    for seed in range(100):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 30, random.integers(2, 60)).astype(np.int32)
        seq_length = int(random.integers(2, 20))
        windows = Windows(seq_length=seq_length, extra=extra, drop_last=drop_last)
        ours = windows.build(lengths, range(len(lengths)), seed=seed)
        if len(ours.shuffle):
            total = int(lengths.sum())
            theirs = build_sample_idx(lengths, ours.documents, seq_length, 1, total, drop_last, int(extra))
            np.testing.assert_array_equal(ours.samples, theirs)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_sample_of_every_split_is_that_of_megatron_core(built_by_megatron, by_hand, sequences, drop_last, extra):
    prefix, split = by_hand("corpus", sequences), "70,20,10"
    keys = {"drop_last_partial_validation_sequence": drop_last, "add_extra_token_to_sequence": extra}
    wanted = built_by_megatron(prefix, split, **keys)
    source = IndexedTokens(prefix)
    for which, part in enumerate(split_bounds(read_shares(split), len(source))):
        drop = drop_last or which != 1
        indices = Windows(seq_length=16, extra=extra, drop_last=drop).build(source.lengths, part, seed=11)
        settings = {"seq_length": 16, "extra": extra, "packing": None, "eod_id": 7, "vocab_size": 259}
        ours = IndexedDataset(source, indices, **settings, content="")
        assert len(ours) == len(wanted[which]) > 0
        for number in range(len(ours)):
            sample, other = ours[number], wanted[which][number]
            assert sample.input_ids.tolist() == other["tokens"].tolist()
            counted = other["loss_mask"].bool()
            assert (sample.labels != -100).tolist() == counted.tolist()
            assert sample.labels[counted].tolist() == other["labels"][counted].tolist()


@pytest.mark.parametrize("text", ["980,10,10", "1,0,0", "99/1", "0.5, 0.25, 0.25", "949,50,1"])
@pytest.mark.parametrize("count", [1, 7, 100, 12345])
def test_splits_are_those_of_megatron_core(megatron, text, count):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    wanted = [range(*(round(end * float(count)) for end in ends)) if ends else range(0) for ends in matrix]
    assert [list(part) for part in split_bounds(read_shares(text), count)] == [list(part) for part in wanted]


BUILD = """
import sys, time
from pathlib import Path
import numpy as np
from nxdt_plugin_megatron_data.loader import cached_indices
from nxdt_plugin_megatron_data.loader import Windows
def build():
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(float(sys.argv[3]))
    return Windows(seq_length=8).build(np.full(50, 9, np.int32), range(50), seed=1)
indices = cached_indices(Path(sys.argv[1]), "x", build, bool)
print(indices.shuffle.sum(), indices.samples.shape)
"""


def start(directory, log, seconds):
    command = [sys.executable, "-c", BUILD, str(directory), str(log), str(seconds)]
    return processes.Popen(command, stdout=subprocess.PIPE, text=True)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_of_many_processes_one_builds(tmp_path):
    ranks = [start(tmp_path / "cache", tmp_path / "log", 0.5) for _ in range(4)]
    said = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert len(said) == 1
    assert "(57, 2)" in said.pop()
    assert (tmp_path / "log").read_text() == "built\n"
    assert sorted(os.listdir(tmp_path / "cache")) == ["x"]


def test_another_process_builds_where_the_first_is_killed(tmp_path):
    log = tmp_path / "log"
    first = start(tmp_path / "cache", log, 600)
    until(log.exists)
    second = start(tmp_path / "cache", log, 0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert "(57, 2)" in second.communicate(timeout=60)[0]
    assert log.read_text() == "built\nbuilt\n"


small = partial(Windows(seq_length=8).build, np.full(50, 9, np.int32), range(50), seed=1)
of_small = partial(Windows(seq_length=8).fit, lengths=np.full(50, 9, np.int32), documents=range(50))


@pytest.mark.parametrize("damage", ["cut", "gone", "text", "order"])
def test_a_damaged_index_is_built_again(tmp_path, damage):
    cached_indices(tmp_path, "x", small, of_small)
    file = tmp_path / "x/samples.npy"
    {
        "cut": lambda: os.truncate(file, 200),
        "gone": file.unlink,
        "text": lambda: file.write_text("no index"),
        "order": lambda: np.save(file, np.load(file)[::-1]),
    }[damage]()
    again = cached_indices(tmp_path, "x", small, of_small)
    assert all(np.array_equal(ours, whole) for ours, whole in zip(astuple(again), astuple(small()), strict=True))


def test_a_kept_index_is_not_built_again(tmp_path):
    cached_indices(tmp_path, "x", small, of_small)

    def never() -> Indices:
        raise AssertionError("built twice")

    assert len(cached_indices(tmp_path, "x", never, of_small).shuffle) == 56


def test_where_nothing_can_be_written_the_index_stays_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert len(cached_indices(tmp_path / "file" / "cache", "x", small, of_small).shuffle) == 56
    assert "each process builds its own" in caplog.text
    assert Path(tmp_path / "file").read_text() == ""
