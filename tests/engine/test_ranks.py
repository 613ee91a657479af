"""The pools of ranks themselves: order, environment, failures that are told and hang nobody."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from nxdt_testing.processes.rank_worker import import_module
from nxdt_testing.ranks import RankPool, RanksFailed, end_lasting_ranks, process_group


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


@dataclass(frozen=True)
class Parcel:
    """Defined in a test's file, which no worker can import by name."""

    tensor: torch.Tensor


def doubled(parcel):
    return os.environ["RANK"], Parcel(parcel.tensor * 2)


def world():
    with process_group():
        ranks = torch.tensor([dist.get_rank()])
        dist.all_reduce(ranks)
        return ranks.item(), dist.get_world_size(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def leave_state_behind():
    global left
    seen = "left" in globals()
    left = True
    return seen, os.getpid()


def one_raises(rank_that_fails):
    with process_group():
        if dist.get_rank() == rank_that_fails:
            raise ValueError("boom on purpose")
        dist.all_reduce(torch.ones(1))


def one_raises_and_others_never_end():
    print("said before")
    if os.environ["RANK"] == "0":
        raise ValueError("boom on purpose")
    wait_for_nothing()


def wait_for_nothing():
    time.sleep(600)


def a_collective_that_one_rank_skips():
    with process_group(timeout_s=300):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            wait_for_nothing()


def one_dies():
    with process_group(timeout_s=300):
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)  # the other rank is connected
            os.kill(os.getpid(), signal.SIGKILL)
        dist.send(torch.ones(1), 1)
        wait_for_nothing()


def sleeps(rank):
    time.sleep(60 * (os.environ["RANK"] == str(rank)))


def unpicklable():
    return lambda: None


def first_run_finds_its_port_taken(marker):
    if not os.path.exists(marker):
        if os.environ["RANK"] == "0":
            open(marker, "w").close()
        raise RuntimeError("The server socket has failed to listen: EADDRINUSE")
    return os.environ["MASTER_PORT"]


def test_results_come_back_by_rank(ranks):
    results = ranks(3).run(doubled, Parcel(torch.arange(3)))
    assert [rank for rank, _ in results] == ["0", "1", "2"]
    assert all(parcel.tensor.tolist() == [0, 2, 4] for _, parcel in results)


def test_ranks_form_a_group_with_one_thread_each(ranks):
    assert ranks(2).run(world) == [(1, 2, 1, "1")] * 2
    assert ranks(4).run(world) == [(6, 4, 1, "1")] * 4


def test_ranks_of_tests_see_no_gpu(ranks):
    assert ranks(2).run(visible_gpus) == [""] * 2


def test_a_run_meets_nothing_of_the_run_before(ranks):
    (seen, first), *_ = ranks(2).run(leave_state_behind)
    (seen_again, second), *_ = ranks(2).run(leave_state_behind)
    assert (seen, seen_again) == (False, False)
    assert first != second


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_told_with_its_rank_and_traceback(ranks, rank):
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(one_raises, rank)
    assert caught.value.summary == f"one_raises on 2 ranks: rank {rank} raised ValueError: boom on purpose"
    assert next(iter(caught.value.accounts)) == rank
    assert 'raise ValueError("boom on purpose")' in caught.value.accounts[rank]
    assert ranks(2).run(world)[0][0] == 1


@pytest.mark.slow
def test_ranks_that_do_not_notice_are_stopped_and_say_where_they_were(ranks):
    with pytest.raises(RanksFailed, match="rank 0 raised ValueError: boom") as caught:
        ranks(2).run(one_raises_and_others_never_end)
    assert "said before" in caught.value.accounts[0]
    assert "in wait_for_nothing" in caught.value.accounts[1]


def test_a_hung_collective_ends_with_the_stacks_of_every_rank(ranks):
    with pytest.raises(RanksFailed, match="not done within 3 s") as caught:
        ranks(2).run(a_collective_that_one_rank_skips, timeout_s=3)
    assert "in all_reduce" in caught.value.accounts[0]
    assert "in wait_for_nothing" in caught.value.accounts[1]
    assert ranks(2).run(world)[0][0] == 1


def test_a_dead_rank_is_noticed(ranks, monkeypatch):
    monkeypatch.setattr("nxdt_testing.ranks._GRACE_S", 1.0)
    with pytest.raises(RanksFailed, match="rank 1 died with exit code -9") as caught:
        ranks(2).run(one_dies)
    assert "in wait_for_nothing" in caught.value.accounts[0]


def test_a_result_that_does_not_pickle_is_an_error_of_that_rank(ranks):
    with pytest.raises(RanksFailed, match=r"rank 0 raised .*(pickle|local object)"):
        ranks(1).run(unpicklable)


def test_a_taken_port_is_tried_again(ranks, tmp_path):
    assert int(ranks(1).run(first_run_finds_its_port_taken, str(tmp_path / "marker"))[0]) > 0


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal, time
            from nxdt_testing.ranks import RankPool

            def stay(where):
                pathlib.Path(where, str(os.getpid())).touch()
                time.sleep(600)

            if __name__ == "__main__":
                RankPool(2).run(stay, os.getcwd())
            """
        )
    )
    (tmp_path / "pids").mkdir()
    parent = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path / "pids")
    pids = _eventually(lambda: [int(p.name) for p in (tmp_path / "pids").iterdir()], lambda found: len(found) == 2)
    parent.kill()
    parent.wait()
    assert not _eventually(lambda: [pid for pid in pids if _runs(pid)], lambda running: not running)


def summed(value):
    with process_group():
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return int(tensor), os.getpid(), os.environ.get("GIVEN")


@pytest.fixture
def lasting():
    return partial(RankPool, lasting=True)


def test_lasting_ranks_take_later_runs_of_their_size(lasting):
    runs = [lasting(world).run(summed, value) for world, value in ((2, 10), (3, 30), (2, 20))]
    assert [[total for total, *_ in run] for run in runs] == [[21] * 2, [93] * 3, [41] * 2]
    pids = [[pid for _, pid, _ in run] for run in runs]
    assert pids[0] == pids[2]
    assert not {*pids[0]} & {*pids[1]}
    end_lasting_ranks()
    assert not any(_runs(pid) for pid in (*pids[0], *pids[1]))


def test_a_lasting_rank_takes_variables_directory_and_modules_of_each_run(lasting, tmp_path, monkeypatch):
    assert lasting(1).run(summed, 0, environment={"GIVEN": "1"})[0][2] == "1"
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "named_as_another.py"
        file.write_text(f"import os\n\ndef say():\n    return {name!r}, os.getcwd()\n")
        monkeypatch.chdir(file.parent)
        said = import_module("named_as_another", str(file)).say
        assert lasting(1).run(said) == [(name, str(file.parent))]
    del sys.modules["named_as_another"]
    assert lasting(1).run(summed, 0)[0][2] is None


@pytest.mark.parametrize(
    ("function", "timeout_s", "said"), [(one_raises, 60, "boom on purpose"), (sleeps, 2, "in sleeps")]
)
def test_lasting_ranks_of_which_one_fails_or_hangs_end_and_others_follow(lasting, function, timeout_s, said):
    (_, before, _), _ = lasting(2).run(summed, 1)
    with pytest.raises(RanksFailed, match=said):
        lasting(2).run(function, 1, timeout_s=timeout_s)
    assert not _runs(before)
    (total, after, _), _ = lasting(2).run(summed, 2)
    assert (total, after != before) == (5, True)


def test_a_pool_needs_no_fixture():
    assert RankPool(1).run(world) == [(0, 1, 1, "1")]


def _eventually(look, enough, seconds=60):
    deadline = time.monotonic() + seconds
    while not enough(found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
