"""The pieces of launching, one by one: variables, verdicts, the supervisor's connections, agreement over the hosts."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, process_group

from nxdt_core.callback import Run
from nxdt_core.distributed.environment import first_host, read_rank_environment
from nxdt_core.distributed.process_group import Ranks, connect_store
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.data import DataFileNotFound
from nxdt_core.errors.ranks import (
    BadLaunchVariable,
    CannotReachRankZero,
    LaunchEnvironmentIncomplete,
    NodePlaceMissing,
    OutOfMemory,
    PortTaken,
)
from nxdt_core.launch.launcher import node_from_environment
from nxdt_core.launch.supervision.messages import Done, End, Failure, Hello, Stop, decode, encode
from nxdt_core.launch.supervision.root_cause import decide
from nxdt_core.launch.supervision.supervisor import Supervisor
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.run.callbacks.stopping import StopSignals
from nxdt_core.run.log import Console
from nxdt_core.run.report import MemoryUse, compare, memory_errors_explained
from nxdt_core.system.progress import process_age_s

USUAL = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


# Variables


def test_no_variables_are_a_world_of_one():
    place = read_rank_environment({})
    assert (place.rank, place.world_size, place.launcher) == (0, 1, "")


def test_the_usual_variables_win_over_slurms():
    place = read_rank_environment({**SLURM, **USUAL})
    assert (place.rank, place.world_size, place.local_rank) == (3, 4, 1)
    assert (place.master_addr, place.master_port) == ("node0", 29500)


def test_slurm_gives_the_first_host_and_a_port_that_all_tasks_of_a_step_share():
    first, second = (read_rank_environment({**SLURM, "SLURM_PROCID": number}) for number in "05")
    assert (second.rank, second.world_size, second.local_rank, second.master_addr) == (5, 8, 1, "gpu07")
    assert first.master_port == second.master_port
    other = read_rank_environment({**SLURM, "SLURM_JOB_ID": "4712"})
    assert other.master_port != second.master_port
    assert 1024 < second.master_port < 32768


def test_a_step_with_one_task_is_no_launch():
    assert read_rank_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[08-11,14],login", "node08"),
        ("login,node[1-2]", "login"),
        ("rack[1-2]node[01-16]", "rack1node01"),
        ("gpu-1-2", "gpu-1-2"),
        ("n[3,7-9]-ib,other", "n3-ib"),
    ],
)
def test_the_first_host_of_slurms_notation(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name):
    with raises(LaunchEnvironmentIncomplete, match=f"without {name}"):
        read_rank_environment({key: value for key, value in USUAL.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("RANK", "one"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "70000")]
)
def test_a_wrong_variable_is_named_with_its_value(name, value):
    with raises(BadLaunchVariable, match=f"{name} is '{value}'"):
        read_rank_environment({**USUAL, name: value})


def test_several_nodes_need_their_number_and_a_meeting_point():
    with raises(NodePlaceMissing, match="NODE_RANK, MASTER_PORT"):
        node_from_environment(2, {"MASTER_ADDR": "a"})
    node = node_from_environment(2, {"MASTER_ADDR": "a", "MASTER_PORT": "1234", "NODE_RANK": "1"})
    assert (node.rank, node.world_size, node.master_addr, node.master_port) == (1, 2, "a", 1234)
    with raises(BadLaunchVariable, match="NODE_RANK is '2'"):
        node_from_environment(2, {"MASTER_ADDR": "a", "MASTER_PORT": "1234", "NODE_RANK": "2"})


# Verdicts


def failure(rank, kind="bug", text="", status=1):
    return Failure(rank=rank, host=f"host{rank}", kind=kind, text=text, status=status)


def test_a_death_is_the_cause_even_if_others_came_first():
    root_cause = decide([failure(0, text="Connection closed by peer"), failure(2, "death")], 4)
    assert root_cause.dead.rank == 2
    assert "Rank 2 on host2 died" in root_cause.text
    assert "closed" not in root_cause.text
    assert root_cause.status == 1


def test_a_mistake_of_all_needs_no_name_and_one_of_some_does():
    alike = [failure(rank, "mistake", "[X] wrong", 2) for rank in (1, 0)]
    assert decide(alike, 2).text == "[X] wrong"
    assert decide(alike, 3).text == "Rank 1 on host1 failed (and 1 more like it):\n[X] wrong"
    assert decide(alike, 3).status == 2


def test_the_first_bug_has_the_word():
    assert decide([failure(1, text="first"), failure(0, text="second")], 2).text == "Rank 1 on host1 failed:\nfirst"


def test_an_interruption_is_no_failure_of_a_rank():
    root_cause = decide([failure(1, "interrupt", status=143)], 2)
    assert (root_cause.text, root_cause.status) == ("Interrupted.", 143)


# The supervisor


class Member:
    """A rank's end of a connection, without the rest of the rank."""

    def __init__(self, supervisor, rank, token=None):
        self.rank = rank
        self._socket = socket.create_connection(("127.0.0.1", supervisor.port))
        self._socket.settimeout(20)
        self._lines = self._socket.makefile("rb")
        self.send(Hello(token=token or supervisor.token, rank=rank, host=f"host{rank}"))

    def send(self, message):
        self._socket.sendall(encode(message))

    def next(self):
        line = self._lines.readline()
        return decode(line) if line else None

    def close(self):
        self._lines.close()
        self._socket.close()


@pytest.fixture
def supervisor():
    supervisor = Supervisor(world_size=2, address="127.0.0.1", arrival_s=60, in_rank_zero=False)
    supervisor.start()
    return supervisor


def test_a_connection_that_ends_without_a_word_brings_all_down(supervisor):
    members = [Member(supervisor, rank) for rank in range(2)]
    members[1].close()
    assert members[0].next() == End(status=1, cause="rank 1 on host1 died")
    assert supervisor.wait_for_root_cause().dead.rank == 1


def test_all_leave_together_with_the_highest_status(supervisor):
    members = [Member(supervisor, rank) for rank in range(2)]
    members[0].send(Done(rank=0, status=0))
    members[1].send(Done(rank=1, status=143))
    assert [member.next() for member in members] == [End(status=143)] * 2
    members[1].close()
    assert supervisor.root_cause is None
    assert supervisor.status == 143


def test_failures_within_a_second_are_judged_together(supervisor):
    members = [Member(supervisor, rank) for rank in range(2)]
    for member in reversed(members):
        member.send(failure(member.rank, "mistake", "[X] the same", 2))
    assert [member.next().status for member in members] == [2, 2]
    assert supervisor.root_cause.text == "[X] the same"


def test_a_rank_that_told_its_failure_may_hang_up(supervisor):
    members = [Member(supervisor, rank) for rank in range(2)]
    members[1].send(failure(1, text="ValueError: x"))
    members[1].close()
    assert members[0].next().cause == "rank 1 on host1 failed"
    assert "ValueError" in supervisor.root_cause.text


def test_a_request_to_stop_reaches_ranks_that_come_later_and_a_second_ends_all(supervisor):
    first = Member(supervisor, 0)
    supervisor.stop(15, urgent=False)
    assert first.next() == Stop(signal=15)
    late = Member(supervisor, 1)
    assert late.next() == Stop(signal=15)
    supervisor.stop(15, urgent=True)
    assert first.next() == late.next() == End(status=130, cause="it was interrupted")


def test_a_connection_without_the_token_is_closed(supervisor):
    with closing(Member(supervisor, 1, token="guessed")) as stranger:
        assert stranger.next() is None
    assert supervisor.root_cause is None


def test_a_line_that_is_no_message_is_refused():
    for line in (b"[]", b'{"is": "Nothing"}', b'{"is": "Done"}', b"{"):
        with pytest.raises(ValueError, match=r".*"):
            decode(line)


# The store


def place(port, rank, host="127.0.0.1"):
    return RankEnvironment(rank=rank, world_size=2, host="here", master_addr=host, master_port=port)


def test_a_store_where_another_program_listens_is_told_by_rank_zero_and_by_the_others(monkeypatch):
    monkeypatch.setenv("NXDT_JOIN_TIMEOUT_S", "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises(PortTaken, match=f"Port {port}"):
            connect_store(place(port, rank=0))
        with raises(CannotReachRankZero, match="does not answer as the store"):
            connect_store(place(port, rank=1))


def test_a_store_that_nobody_serves_is_told(monkeypatch):
    monkeypatch.setenv("NXDT_JOIN_TIMEOUT_S", "1")
    with raises(CannotReachRankZero, match=r"rank 1 on here could not reach rank 0 at 127.0.0.1:1 within 1 s"):
        connect_store(place(1, rank=1))
    monkeypatch.setenv("NXDT_JOIN_TIMEOUT_S", "soon")
    with raises(BadLaunchVariable, match="NXDT_JOIN_TIMEOUT_S"):
        connect_store(place(1, rank=1))


# Agreement


def threads_of(cores, variables):
    """Threads of each rank of two on a host of eight cores, started without OMP_NUM_THREADS."""
    del os.environ["OMP_NUM_THREADS"]
    os.environ.update(variables)
    torch.set_num_threads(8)
    os.sched_getaffinity = lambda pid: cores[int(os.environ["RANK"])]
    ranks = Ranks.from_environment()
    ranks.start(torch.device("cpu"))
    ranks.stop()
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("cores", "variables", "threads"),
    [
        ([range(8)] * 2, {}, 4),
        ([range(6), range(6, 8)], {}, [6, 2]),
        ([range(1)] * 2, {}, 1),
        ([range(8)] * 2, {"OMP_NUM_THREADS": "8"}, 8),
    ],
    ids=["shared", "bound", "fewer cores than ranks", "chosen"],
)
def test_ranks_that_another_launcher_started_divide_the_cores_that_they_share(cores, variables, threads):
    each = threads if isinstance(threads, list) else [threads] * 2
    assert RankPool(2).run(threads_of, cores, variables) == each


def agree():
    ranks = Ranks.from_environment()
    ranks.start(torch.device("cpu"))
    before = [ranks.largest_before(value) for value in (10 * ranks.rank, 0, 0)]
    found = {
        "gathered": ranks.all_gather_object((ranks.rank, ranks.local_rank)),
        "broadcast": [ranks.broadcast_object(ranks.rank), ranks.broadcast_object(ranks.rank, 1)],
        "any": [ranks.any_rank(False), ranks.any_rank(ranks.rank == 1)],
        "before": [*before, ranks.last_answer(), ranks.last_answer()],
        "zero": ranks.on_rank_zero(lambda: f"from rank {ranks.rank}"),
    }
    try:
        ranks.on_rank_zero(lambda: raise_mistake(ranks.rank))
    except NxdtError as error:
        found["mistake"] = error.path
    ranks.barrier()
    ranks.stop()
    ranks.stop()
    return found, torch.distributed.is_initialized()


def raise_mistake(rank):
    raise DataFileNotFound(path=f"seen by rank {rank}", key="data.train_files")


def agree_within_a_users_group():
    with process_group():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        ranks = Ranks.from_environment()
        ranks.start(torch.device("cpu"))
        found = ranks.all_gather_object(ranks.rank)
        ranks.stop()
        return found, torch.distributed.is_initialized()


def test_ranks_agree_over_their_hosts_and_leave():
    for found, joined in RankPool(2).run(agree):
        assert found == {
            "gathered": [(0, 0), (1, 1)],
            "broadcast": [0, 1],
            "any": [False, True],
            "before": [0, 10, 0, 0, 0],
            "zero": "from rank 0",
            "mistake": "seen by rank 0",
        }
        assert not joined


def test_a_group_that_exists_is_used_and_left_alone():
    assert RankPool(2).run(agree_within_a_users_group) == [([0, 1], True)] * 2


def test_one_process_gives_back_what_it_is_given():
    ranks = Ranks(RankEnvironment(host="here"))
    ranks.start(torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    assert ranks.all_gather_object("x") == ["x"]
    assert ranks.broadcast_object("x") == ranks.on_rank_zero(lambda: "x") == "x"
    assert [ranks.largest_before(15), ranks.last_answer()] == [15, 0]
    ranks.stop()


# Signals


class TwoRanks:
    """Agreement of two ranks of which the other has nothing to say."""

    world_size = 2

    def __init__(self):
        self.before = 0

    def largest_before(self, value, *, topic=""):
        answer, self.before = self.before, value
        return answer

    def last_answer(self):
        return self.before


def test_a_request_that_comes_twice_at_once_is_one_and_a_later_one_is_urgent():
    """A scheduler signals every process of a job, and an agent among them passes its own signal on."""
    signals = StopSignals(Console(1, speaks=False), TwoRanks())
    run = Run(SimpleNamespace(), print, {})
    signals.on_fit_start(run)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.on_step_end(run)
        assert not run.stopping, "the other rank does not know yet"
        signals.on_step_end(run)
        assert run.stopping
        assert signals.received == signal.SIGTERM
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signals.close(run)


# Memory


class Session:
    """What is asked of a session when memory ends."""

    config = built_model = built_optimizer = None
    engine = SimpleNamespace(
        device=torch.device("cpu"), ranks=Ranks(RankEnvironment(host="here", rank=3, world_size=4))
    )


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_is_told_with_rank_and_figures(error):
    with (
        raises(OutOfMemory, match=r"Rank 3 on here ran out of memory on cpu: .* GiB"),
        memory_errors_explained(Session()),
    ):
        raise error


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), memory_errors_explained(Session()):
        raise RuntimeError("shapes do not match")


def test_the_part_that_exceeded_the_estimate_is_named():
    gib = 2**30
    estimated = MemoryUse(held=4 * gib, step=10 * gib)
    assert compare(MemoryUse(held=4 * gib, step=30 * gib), estimated) == (
        " Of that, 4.0 GiB weights, gradients and optimizer state (estimated: 4.0) and "
        "30.0 GiB activations and buffers (estimated: 10.0): activations and buffers exceeded the estimate."
    )
    assert "weights, gradients and optimizer state exceeded" in compare(MemoryUse(held=9 * gib, step=gib), estimated)
    assert "the device is too small" in compare(MemoryUse(held=4 * gib, step=2 * gib), estimated)
    assert compare(MemoryUse(held=1, step=1), None) == ""


def starts_again_while_rank_zero_is_late():
    found = []
    for _ in range(2):
        ranks = Ranks.from_environment()
        ranks.start(torch.device("cpu"), timeout_s=20)
        found.append(ranks.all_gather_object(ranks.rank))
        if ranks.rank == 0:
            time.sleep(0.5)
        ranks.stop()
    return found


def test_a_rank_that_starts_again_before_rank_zero_has_stopped_finds_its_store():
    assert RankPool(2).run(starts_again_while_rank_zero_is_late) == [[[0, 1]] * 2] * 2


def test_the_age_of_a_process_is_what_passed_since_its_start():
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.3)
        age_s = process_age_s(child.pid)
        passed_s = time.monotonic() - began
        child.kill()
    assert 0.25 < age_s < passed_s + 0.05, "the system counts in hundredths of a second"
    assert process_age_s(child.pid) == 0, "it has ended"
