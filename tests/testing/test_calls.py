"""Ranks that stay for several calls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.ranks import RanksFailed, process_group

from tests.calls import LastingRanks


@pytest.fixture(scope="module")
def ranks():
    lasting = LastingRanks()
    yield lasting
    lasting.close()


def summed(value: int) -> tuple[int, int]:
    with process_group():
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return int(tensor), os.getpid()


def fail_on_the_second() -> None:
    assert os.environ["RANK"] == "0", "not here"


def sleep_on_the_second() -> None:
    time.sleep(int(os.environ["RANK"]) * 60)


def test_calls_meet_the_same_processes_in_worlds_of_their_own(ranks):
    first, second, (alone,) = (ranks(world).run(summed, value) for world, value in ((2, 10), (2, 20), (1, 30)))
    assert [total for total, _ in (*first, *second, alone)] == [21, 21, 41, 41, 30]
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert alone[1] == first[0][1]


@pytest.mark.parametrize(
    ("function", "said"), [(fail_on_the_second, "not here"), (sleep_on_the_second, "in sleep_on_the_second")]
)
def test_a_call_that_fails_or_takes_too_long_says_where_and_others_follow_in_new_ranks(ranks, function, said):
    (_, before), _ = ranks(2).run(summed, 1)
    with pytest.raises(RanksFailed, match=said):
        ranks(2).run(function, timeout_s=1)
    (total, after), _ = ranks(2).run(summed, 2)
    assert total == 5
    assert after != before
    assert not Path(f"/proc/{before}").exists()
