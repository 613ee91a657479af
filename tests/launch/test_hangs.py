"""Runs in which a rank hangs: how heartbeats show it, and what the run says and leaves when it ends."""

import re
import signal
import socket
import time

import pytest

from nxdt_core.launch.supervision.messages import Beat
from nxdt_core.launch.supervision.root_cause import BUSY_FACTOR, HangWatch
from tests.launch.launching import faulty, finish, gone, ranks_of, start, wait_for_rows, words
from tests.sampling import slow

LIMIT_S = 60.0


def beat(rank, *, count=0, begun=0, done=0, waiting=False, cpu_s=0.0):
    return Beat(
        rank=rank,
        host="node7",
        pid=4000 + rank,
        limit_s=LIMIT_S,
        step=12,
        phase="training",
        count=count,
        begun=begun,
        done=done,
        waiting=waiting,
        last="",
        cpu_s=cpu_s,
    )


def watch(*rounds):
    """A watch that hears each round of heartbeats 10 s after the one before, and the time of the last one."""
    found = HangWatch()
    for number, beats in enumerate(rounds):
        for each in beats:
            found.record(each, 10.0 * number)
    return found, 10.0 * (len(rounds) - 1)


# Heartbeats


def test_a_rank_that_sends_none_is_silent():
    found, now = watch(*([beat(0, count=n), beat(1, count=n)] for n in range(3)), *([beat(0)] for _ in range(6)))
    assert found.check(now - 0.1) is None, "20 s of 60 s are left to it"
    hang = found.check(now)
    assert (hang.kind, [each.rank for each in hang.ranks], hang.seconds) == ("silent", [1], 60.0)


def test_the_rank_that_is_not_in_a_collective_hangs_while_the_others_wait_for_it():
    idle = [beat(0, begun=5, done=4, waiting=True), beat(1, begun=4, done=4), beat(2, begun=5, done=4, waiting=True)]
    hang = (found := watch(*[idle] * 7)[0]).check(60.0)
    assert found.check(59.0) is None
    assert (hang.kind, [each.rank for each in hang.ranks]) == ("stuck", [1])
    assert [each.rank for each in hang.waiting] == [0, 2]


def test_where_all_wait_those_that_have_begun_the_fewest_collectives_hang():
    """Rank 1 has taken another path: it waits in a collective that the others do not reach."""
    idle = [beat(0, begun=9, done=8, waiting=True), beat(1, begun=7, done=6, waiting=True)]
    hang = watch(*[idle] * 7)[0].check(60.0)
    assert [each.rank for each in hang.ranks] == [1]
    assert [each.rank for each in hang.waiting] == [0]


@pytest.mark.parametrize("work", ["count", "begun", "done", "cpu_s"])
def test_a_rank_that_works_keeps_the_run_going(work):
    rounds = [[beat(0, begun=99, done=98, waiting=True), beat(1, **{work: number})] for number in range(12)]
    found, now = watch(*rounds)
    assert found.check(now) is None


def test_cpu_time_of_a_rank_that_waits_is_no_work():
    """NCCL waits for the device in a loop."""
    rounds = [
        [beat(rank, begun=9, done=8, waiting=True, cpu_s=10.0 * number) for rank in (0, 1)] for number in range(7)
    ]
    assert watch(*rounds)[0].check(60.0).kind == "stuck"


def test_a_rank_that_computes_without_an_end_is_named_while_another_waits_for_it():
    count = int(BUSY_FACTOR * LIMIT_S / 10) + 1
    rounds = [[beat(0, begun=9, done=8, waiting=True), beat(1, cpu_s=10.0 * number)] for number in range(count)]
    found, now = watch(*rounds)
    assert found.check(now - 1) is None
    assert [each.rank for each in found.check(now).ranks] == [1]


def test_ranks_that_are_done_are_not_watched():
    found, now = watch([beat(0), beat(1)])
    found.forget(1)
    found.record(beat(0, count=1), now + LIMIT_S)
    assert found.check(now + LIMIT_S) is None
    found.forget(0)
    assert found.check(now + 9 * LIMIT_S) is None


def test_a_supervisor_that_was_stopped_itself_counts_from_when_it_continues():
    found, now = watch([beat(0), beat(1)])
    found.excuse(now + 1000)
    assert found.check(now + 1000 + LIMIT_S - 1) is None
    assert found.check(now + 1000 + LIMIT_S).kind == "silent"


# Runs


@pytest.mark.parametrize(("launcher", "stopped"), [("nxdt", 1), slow("torchrun", 0), slow("torchrun", 1)])
def test_a_stopped_rank_is_named_and_ends_the_run(tmp_path, launcher, stopped):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    before = (torchrun if launcher == "torchrun" else ()) + ("-m", "nxdt_core", "train")
    more = ("distributed_strategy.timeout_s=6", "name=stopped")
    fault = f"SIGSTOP {stopped} 3"
    status, _, err = finish(faulty(tmp_path, fault, *more, before=before, FAULT_S="2.5"), timeout_s=100)
    assert status == 1
    host = socket.gethostname()
    assert re.search(rf"\[NXDT-P080\] No heartbeat came for \d+ s from rank {stopped} on {host}", err), err
    assert ("Traceback" in err) == (launcher == "torchrun"), "torchrun has one of its own"
    assert err.count("NXDT-P080") == 1
    files = sorted(path.name for path in (tmp_path / "stopped" / "stacks").iterdir())
    if launcher == "nxdt" or stopped == 1:
        assert re.search(r"process \d+ was stopped by a signal; last heartbeat: step \d+, \w+[,)]", err)
        assert files == ["rank-00000.txt", "rank-00001.txt"], "a stopped rank is continued to write its stacks"
    else:
        assert files == ["rank-00001.txt"], "the supervisor is in the rank that is stopped"


@pytest.mark.slow  # another test names a rank that is stopped
def test_a_rank_that_sleeps_is_named_and_its_stack_shows_where(tmp_path):
    status, _, err = finish(faulty(tmp_path, "sleep 1 2", "distributed_strategy.timeout_s=6", "name=sleeps"), 60)
    assert status == 1
    host = socket.gethostname()
    assert re.search(rf"\[NXDT-P080\] Other ranks have waited for \d+ s for rank 1 on {host}", err), err
    assert "Waiting: rank 0 in all_reduce" in err
    assert "Traceback" not in err
    stacks = tmp_path / "sleeps" / "stacks"
    assert 'faulty.py", line' in (stacks / "rank-00001.txt").read_text()
    waiting = (stacks / "rank-00000.txt").read_text()
    assert "all_reduce" in waiting.partition("Newest collectives:")[2]
    assert "Current thread" in waiting


def test_a_rank_that_computes_for_long_is_waited_for(tmp_path):
    """As a rank does that compiles, or validates something of its own: with a third of a core here."""
    more = ("distributed_strategy.timeout_s=8", "trainer.max_steps=4")  # less is over on a busy machine before a beat
    status, out, err = finish(faulty(tmp_path, "compute 1 2", *more, FAULT_S="10"))
    assert status == 0, err
    assert "4 of 4" in out


@pytest.mark.slow
def test_a_launcher_that_is_stopped_and_continued_ends_nothing(tmp_path):
    """A person does so with Ctrl-Z and fg."""
    arguments = words(tmp_path, "trainer.devices=2", "trainer.max_steps=100000", "distributed_strategy.timeout_s=4")
    process = start([*arguments, "name=paused"])
    rows = tmp_path / "paused" / "metrics.jsonl"
    wait_for_rows(rows, 2, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    before = len(rows.read_text().splitlines())
    process.send_signal(signal.SIGCONT)
    wait_for_rows(rows, before + 20, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGTERM, err
    assert gone(ranks)
