"""Many ranks from the real command line: started by ``nxdt train`` itself, and how all of them end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.run import train
from nxdt_core.train import build
from tests import processes
from tests.launch.launching import environment, faulty, finish, gone, ranks_of, start, wait_for_rows, words
from tests.sampling import slow

BANNER = r"(?:model|devices|precision|optimizer|data|steps|run|checkpoints) +|building the model|First step after "
"""What a run says before its first step."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, metric_rows):
    """Losses of four steps in this process, each of four micro-batches: of two ranks, each has two of them."""
    where = tmp_path_factory.mktemp("one")
    config = load("recipe:llama-tiny", words(where, "trainer.max_steps=4", "data.micro_batch_size=2")[1:])
    train(config)
    return {step: row["loss"] for step, row in metric_rows(config.run_dir).items()}


@pytest.mark.parametrize("launcher", ["nxdt", slow("torchrun")])
def test_two_ranks_train_as_one_process_does_and_one_of_them_speaks(launcher, tmp_path, metric_rows, one_process):
    """By default, ``test_torchrun.py`` of ``nxd_core`` starts ranks by torchrun, as ``test_launch_joined.py`` does."""
    more = ("data.micro_batch_size=2", "name=two")
    arguments = words(tmp_path, "trainer.max_steps=4", "trainer.devices=2", *more)
    if launcher == "nxdt":
        process = start(arguments)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, "-m", "nxdt_core", "train", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = processes.Popen(command, text=True, env=environment(), **pipes)
    status, out, err = finish(process)
    assert status == 0, err
    assert out.count("steps:") == 1
    assert [line.split()[1] for line in err.splitlines() if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert len(re.findall(r"^First step after [\d.]+ s: ", err, re.MULTILINE)) == 1
    rows = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 4
    assert "start_launch_s" in metric_rows(tmp_path / "two")[1]
    losses = {step: row["loss"] for step, row in metric_rows(tmp_path / "two").items()}
    assert losses == pytest.approx(one_process, abs=1e-5)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    """By default ``test_launch_joined.py`` shows the message, and ``run/test_monitoring.py`` that the run ends."""
    process = faulty(tmp_path, "SIGKILL 1 2")
    status, _, err = finish(process)
    # torch logs "W1122 …" on machines without Triton.
    told = [line for line in err.splitlines() if not re.match(rf"{BANNER}|step |note: |W\d{{4}} ", line)]
    assert status == 1
    assert told[0].startswith(f"[NXDT-P048] Rank 1 on {socket.gethostname()} died by signal SIGKILL")
    assert [line.split()[0] for line in told[2:]] == ["More:"]


@pytest.mark.slow
def test_a_bug_of_one_rank_has_one_traceback_and_its_name(tmp_path):
    """By default ``test_launch_joined.py`` shows the message, and ``launchers/test_lost_node.py`` how the run ends."""
    status, _, err = finish(faulty(tmp_path, "raise 1 2"))
    assert status == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert f"Rank 1 on {socket.gethostname()} failed:\nTraceback" in err
    assert err.count("ValueError: a made-up bug") == 1


def test_a_mistake_that_all_ranks_make_is_told_once_without_names(tmp_path):
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe not text")
    arguments = words(tmp_path, "trainer.max_steps=4", "trainer.devices=2")
    status, _, err = finish(start([*arguments, f"data.train_files=[{tmp_path / 'broken.txt'}]"]))
    assert status == 2
    assert err.count("[NXDT-D") == 1
    assert "Traceback" not in err
    assert "Rank " not in err


@pytest.mark.parametrize(("number", "to"), [slow(signal.SIGINT, "launcher"), (signal.SIGTERM, "rank 1")])
def test_all_ranks_stop_and_save_at_one_step_wherever_the_signal_goes(tmp_path, metric_rows, number, to):
    saving = ("name=stopped", "checkpoint.enabled=true")
    process = start(words(tmp_path, *saving, "trainer.devices=2", "trainer.max_steps=100000"))
    wait_for_rows(tmp_path / "stopped" / "metrics.jsonl", 3, process)
    if to == "launcher":
        process.send_signal(number)
    else:
        os.kill(max(ranks_of(process)), number)
    status, out, err = finish(process)
    assert status == 128 + number, err
    assert err.count(f"{number.name}: stopping") == 1
    assert "Traceback" not in err
    last = max(metric_rows(tmp_path / "stopped"))
    assert f"{last} of 100000" in out
    more = ("checkpoint.resume_if_exists=true", f"trainer.max_steps={last + 1}")
    resumed = load("recipe:llama-tiny", words(tmp_path, *saving, *more)[1:])
    assert checkpoint.latest(build.storage(resumed), warn=print).step == last
    assert train(resumed).step == last + 1, "one process goes on from what two have saved"


@pytest.mark.slow  # a stop that is wanted
def test_a_second_signal_ends_all_at_once(tmp_path):
    process = start(words(tmp_path, "trainer.devices=2", "trainer.max_steps=100000", "name=twice"))
    wait_for_rows(tmp_path / "twice" / "metrics.jsonl", 1, process)
    ranks = ranks_of(process)
    os.kill(ranks[0], signal.SIGSTOP)  # the first request cannot be carried out
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    os.kill(ranks[0], signal.SIGCONT)
    status, _, err = finish(process)
    assert status == 130
    assert [line for line in err.splitlines() if not re.match(rf"{BANNER}|.*step", line)] == ["Interrupted."]
    assert gone(ranks)


def test_ranks_do_not_outlive_their_launcher(tmp_path):
    process = start(words(tmp_path, "trainer.devices=2", "trainer.max_steps=100000", "name=orphans"))
    wait_for_rows(tmp_path / "orphans" / "metrics.jsonl", 1, process)
    ranks = ranks_of(process)
    process.kill()
    assert len(ranks) == 2
    assert gone(ranks)
    assert "The launcher on" in process.communicate()[1]


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, _, err = finish(start(words(tmp_path, "trainer.devices=2"), MASTER_PORT=port))
    assert status == 2
    assert err.startswith(f"[NXDT-P044] Port {port} of 127.0.0.1")


def test_two_nodes_meet_and_train_as_one(tmp_path, metric_rows, one_process):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    arguments = words(tmp_path, "trainer.max_steps=4", "trainer.num_nodes=2", "name=nodes")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start(arguments, NODE_RANK=str(number), **meeting) for number in (1, 0)]
    ends = [finish(node) for node in nodes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert [out.count("steps:") for _, out, _ in ends] == [0, 1]
    losses = {step: row["loss"] for step, row in metric_rows(tmp_path / "nodes").items()}
    assert losses == pytest.approx(one_process, abs=1e-5)
