"""Every layout, worker count and interruption gives the same global batches."""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, process_group

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.errors.data import BadBatchSize, DataChanged, DataRankMissing, EmptyDataset
from tests import processes


def loader(dataset, global_batch=8, micro_batch=2, **keywords):
    keywords = {"seed": 7, "shuffle": True, **keywords}
    return GlobalBatchLoader(dataset, global_batch_size=global_batch, micro_batch_size=micro_batch, **keywords)


@pytest.fixture(params=["by_index", "in_order"])
def dataset(request, by_index, in_order):
    """A fresh dataset of 30 samples a call: no multiple of the global batch."""
    return (lambda: by_index(30)) if request.param == "by_index" else (lambda: in_order(30))


def steps(items, names, count=None):
    return [names(batches) for batches in islice(items, count)]


def test_an_epoch_holds_each_sample_once_and_the_next_in_another_order(by_index, names):
    seen = [name for step in steps(loader(by_index(24)), names, 6) for name in step]
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:] != list(range(24))


def test_epochs_follow_without_a_gap_where_batches_do_not_divide_them(dataset, names):
    seen = [name for step in steps(loader(dataset()), names, 15) for name in step]
    for epoch in range(4):
        assert sorted(seen[epoch * 30 : epoch * 30 + 30]) == list(range(30))


def test_without_shuffling_samples_come_in_sequence(by_index, names):
    assert steps(loader(by_index(6), 4, 2, shuffle=False), names, 3) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_a_dataset_smaller_than_the_global_batch_repeats_within_it(by_index, names):
    assert steps(loader(by_index(3), shuffle=False), names, 1) == [[0, 1, 2, 0, 1, 2, 0, 1]]


def test_a_step_is_this_ranks_micro_batches(by_index):
    (batches,) = islice(loader(by_index(30), 12, 3, dp_rank=0, dp_size=2), 1)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(3, 4), (3, 4)]
    assert batches[0].input_ids.dtype == torch.int64


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_take_contiguous_slices_of_the_same_global_batch(dataset, names, dp_size, micro_batch, workers):
    whole = steps(loader(dataset(), 8, 8), names, 9)
    parts = [
        steps(loader(dataset(), 8, micro_batch, dp_rank=r, dp_size=dp_size, num_workers=workers), names, 9)
        for r in range(dp_size)
    ]
    assert [[name for rank in ranks for name in rank] for ranks in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("stop", range(9))
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not(dataset, names, stop, workers):
    uninterrupted = steps(loader(dataset()), names, 9)
    first = loader(dataset(), num_workers=workers)
    iterator = iter(first)
    before = steps(iterator, names, stop)
    state = json.loads(json.dumps(first.state_dict()))
    iterator.close()
    assert state["consumed_samples"] == first.consumed_samples == stop * 8
    second = loader(dataset(), num_workers=workers)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert before + steps(second, names, 9 - stop) == uninterrupted


@pytest.mark.parametrize("dp_size", [2, 4])
def test_a_run_goes_on_on_another_number_of_ranks_and_with_another_global_batch(dataset, names, dp_size):
    whole = [name for step in steps(loader(dataset()), names, 8) for name in step]
    first = loader(dataset(), dp_rank=1, dp_size=2)
    steps(first, names, 4)
    ranks = [loader(dataset(), 16, 1, dp_rank=r, dp_size=dp_size, num_workers=1) for r in range(dp_size)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    parts = [steps(rank, names, 2) for rank in ranks]
    assert [name for step in zip(*parts, strict=True) for part in step for name in part] == whole[32:]


def test_a_run_goes_on_from_the_very_end_of_the_data(in_order, names):
    first = loader(in_order(16))
    steps(first, names, 2)
    second = loader(in_order(16))
    second.load_state_dict(first.state_dict())
    assert steps(second, names, 1) == [list(range(8))]


def test_an_iteration_that_is_left_goes_on_in_the_next(dataset, names):
    uninterrupted = steps(loader(dataset()), names, 6)
    one = loader(dataset(), num_workers=2)
    left = iter(one)
    assert steps(left, names, 2) + steps(one, names, 4) == uninterrupted
    assert list(left) == []


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_single_pass_sees_each_sample_once_and_fills_up_with_blanks(dataset, names, workers):
    one = loader(dataset(), 8, 4, repeat=False, shuffle=False, num_workers=workers)
    expected = [[*range(8)], [*range(8, 16)], [*range(16, 24)], [24, 25, 26, 27, 28, 29, -1, -1]]
    assert steps(one, names) == expected
    assert steps(one, names, 2) == expected[:2]
    assert steps(one, names) == expected


def test_a_short_batch_has_only_the_micro_batches_that_it_needs(dataset, names):
    *_, last = steps(loader(dataset(), 28, 4, repeat=False, shuffle=False), names)
    assert last == [28, 29, -1, -1]


@pytest.mark.parametrize("dp_size", [2, 4])
def test_in_a_short_batch_all_ranks_have_equally_many_micro_batches(dataset, names, dp_size):
    ranks = [loader(dataset(), 8, 1, repeat=False, shuffle=False, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
    last = [steps(rank, names)[-1] for rank in ranks]
    assert {len(names) for names in last} == {min(6, 8 // dp_size)}
    assert sorted(name for names in last for name in names if name >= 0) == [24, 25, 26, 27, 28, 29]


def test_drop_last_leaves_a_short_batch_out(dataset, names):
    assert len(steps(loader(dataset(), repeat=False, drop_last=True), names)) == 3
    assert len(steps(loader(dataset(), 10, 2, repeat=False, drop_last=True), names)) == 3


def test_a_single_pass_can_be_resumed(dataset, names):
    first = loader(dataset(), repeat=False)
    everything = steps(first, names)
    steps(first, names, 2)
    second = loader(dataset(), repeat=False)
    second.load_state_dict(first.state_dict())
    assert steps(second, names) == everything[2:]
    assert steps(second, names) == everything


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_of_the_dataset_reaches_the_caller_at_its_step(by_index, names, workers):
    iterator = iter(loader(by_index(30, fails_at=17), shuffle=False, num_workers=workers))
    assert len(steps(iterator, names, 2)) == 2
    with pytest.raises(RuntimeError, match="sample 17 is damaged"):
        next(iterator)
    assert not [t for t in threading.enumerate() if t.name.startswith("nxdt-data")]


def test_threads_end_when_the_iteration_is_left(dataset):
    iterator = iter(loader(dataset(), num_workers=2))
    next(iterator)
    assert [t for t in threading.enumerate() if t.name.startswith("nxdt-data")]
    del iterator
    assert not [t for t in threading.enumerate() if t.name.startswith("nxdt-data")]
    one = loader(dataset(), num_workers=2)
    held = iter(one)
    next(held)
    one.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("nxdt-data")]


def test_a_program_that_ends_within_an_iteration_ends():
    program = """
import numpy as np
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.data.packing import PackedDataset
from nxdt_core.data.tokens import TokenStream
stream = TokenStream(tokens=np.arange(1000, dtype=np.uint16), starts=np.array([0]))
iterator = iter(GlobalBatchLoader(PackedDataset(stream, seq_length=9), global_batch_size=4, micro_batch_size=2,
                                  seed=0, shuffle=True, num_workers=2))
next(iterator)
print("left")
"""
    done = processes.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.parametrize(
    ("change", "saved", "found"),
    [
        ({"digest": "other"}, "by-index", "other"),
        ({"seed": 8}, "shuffled with seed 7", "shuffled with seed 8"),
        ({"shuffle": False}, "shuffled with seed 7", "in sequence"),
    ],
)
def test_a_state_of_other_data_is_refused_naming_both(by_index, change, saved, found):
    state = loader(by_index(30)).state_dict()
    digest = change.pop("digest", "by-index")
    other = loader(by_index(30, digest=digest), **change)
    with raises(DataChanged) as caught:
        other.load_state_dict(state)
    assert saved in str(caught.value)
    assert found in str(caught.value)
    assert "checkpoint.weight_init_only=true" in caught.value.do()
    assert other.consumed_samples == 0


@pytest.mark.parametrize("sizes", [(8, 3, 1), (8, 4, 4), (0, 1, 1), (4, 0, 1), (6, 2, 2)])
def test_batch_sizes_that_do_not_divide_are_refused(by_index, sizes):
    global_batch, micro_batch, dp_size = sizes
    with raises(BadBatchSize, match="does not divide"):
        loader(by_index(30), global_batch, micro_batch, dp_rank=0, dp_size=dp_size)


def in_one_of_several_processes(dataset):
    with process_group():
        with raises(DataRankMissing, match="one of 2 processes") as refused:
            loader(dataset)
        whole = next(iter(loader(dataset, dp_rank=0, dp_size=1)))
        own = next(iter(loader(dataset, dp_rank=dist.get_rank(), dp_size=2)))
    return refused.value.code, len(whole), len(own)


def test_in_one_of_several_processes_a_loader_must_be_given_its_rank(by_index):
    assert RankPool(2).run(in_one_of_several_processes, by_index(30)) == [("NXDT-D025", 4, 2)] * 2


@pytest.mark.parametrize("half", [{"dp_rank": 0}, {"dp_size": 2}])
def test_rank_and_number_of_ranks_are_given_together(by_index, half):
    with pytest.raises(ValueError, match="dp_rank and dp_size"):
        loader(by_index(30), **half)


def test_a_rank_outside_the_group_is_refused(by_index):
    with pytest.raises(ValueError, match="dp_rank 2"):
        loader(by_index(30), dp_rank=2, dp_size=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_dataset_is_refused_and_not_waited_for(by_index, in_order, workers):
    with raises(EmptyDataset):
        loader(by_index(0))
    with raises(EmptyDataset):
        next(iter(loader(in_order(0), num_workers=workers)))


def test_an_iterable_dataset_is_read_by_one_thread_at_a_time(in_order, names):
    class Slow(in_order):
        def __iter__(self):
            for sample in super().__iter__():
                time.sleep(0.001)  # a second thread would find the generator running, which raises
                yield sample

    assert steps(loader(Slow(None), num_workers=3), names, 4)[3] == list(range(24, 32))


def test_an_endless_dataset_needs_no_repetition(in_order, names):
    assert steps(loader(in_order(None), 4, 2, repeat=False), names, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_batch_of_a_pass_has_as_many_micro_batches_as_the_others_where_that_is_asked(dataset, names, ranks):
    """The samples are those of a pass that is not filled up; what is added has no loss tokens."""
    one_pass = {"shuffle": False, "repeat": False, "dp_size": ranks}
    for rank in range(ranks):
        filled = [*loader(dataset(), **one_pass, dp_rank=rank, constant_micro_batches=True)]
        plain = [*loader(dataset(), **one_pass, dp_rank=rank)]
        assert [len(batches) for batches in filled] == [8 // 2 // ranks] * 4
        assert len(plain[-1]) <= len(filled[-1])
        assert [sum(float(batch.weight()) for batch in batches) for batches in filled] == [
            sum(float(batch.weight()) for batch in batches) for batches in plain
        ]
