"""A run over two nodes, of which one is lost: both start again, and resume from the newest checkpoint.

The nodes are launchers on this machine, with one rank each. A lost node is one whose processes are all killed, and that
something else starts again, as a cluster does.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests import processes
from tests.launch import launching, waits
from tests.launch.launching import gone
from tests.sampling import sampled
from tests.train.small import SMALL

STEPS = 6
DEADLINE_S = 250
"""For machines that do much else."""


def pytest_generate_tests(metafunc):
    if "lost" in metafunc.fixturenames:
        metafunc.parametrize("lost", [1, *sampled(metafunc.config, [0], 0)])


_started = []


@pytest.fixture(autouse=True)
def all_ended():
    """End what a test that failed has started, with all processes below."""
    yield
    for process in _started:
        for pid in family(process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    _started.clear()


def begin(words, **variables):
    _started.append(launching.start(words, **variables))
    return _started[-1]


def finish(process):
    return launching.finish(process, DEADLINE_S)


def arguments(where, name, *more):
    shutil.copy(waits.__file__, where)
    keys = (f"trainer.max_steps={STEPS}", "checkpoint.every_n_train_steps=2", "trainer.callbacks=[waits]")
    resume = ("checkpoint.resume_if_exists=true", "checkpoint.resume_ignore_no_checkpoint=true")
    plugin = (f"plugins.local=[{where / 'waits.py'}]", f"exp_manager.exp_dir={where}", f"name={name}")
    return ["recipe:llama-tiny", *SMALL, *keys, *resume, *plugin, *more]


def begin_node(number, where, port, *options):
    words = [*options, *arguments(where, "parts", "trainer.num_nodes=2", "trainer.devices=1")]
    place = {"NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return begin(words, PYTHONPATH=str(where), NXDT_JOIN_TIMEOUT_S="300", **place)


def family(pid):
    """A process and all below it, without the servers of forks."""
    if Path(f"/proc/{pid}/comm").read_text().strip() == processes.SPARE:
        return []
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def wait_until(true, started):
    end = time.monotonic() + DEADLINE_S
    while not true():
        ended = [each for each in started if each.poll() is not None]
        assert not ended, [each.communicate() for each in ended]
        assert time.monotonic() < end
        time.sleep(0.05)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_both_nodes_start_again_after_one_is_lost_and_resume(tmp_path, metric_rows, lost):
    (tmp_path / "lost").touch()
    whole = begin(arguments(tmp_path, "whole", "trainer.devices=2"), PYTHONPATH=str(tmp_path))
    status, _, err = finish(whole)
    assert status == 0, err
    (tmp_path / "lost").unlink()
    port = free_port()
    nodes = [begin_node(number, tmp_path, port, "--max-restarts=2") for number in range(2)]
    kept = tmp_path / "parts/checkpoints/step-00000004/manifest.json"
    reached = [tmp_path / f"reached-{rank}" for rank in range(2)]
    wait_until(lambda: kept.exists() and all(path.exists() for path in reached), nodes)
    killed = family(nodes[lost].pid)
    assert len(killed) == 3
    (tmp_path / "lost").touch()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    nodes[lost].communicate()
    assert gone(killed)
    nodes[lost] = begin_node(lost, tmp_path, port, "--max-restarts=2")
    ended = [finish(node) for node in nodes]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "restart 1 of 2 from the newest checkpoint" in ended[1 - lost][2]
    if lost == 0:
        assert f"the launcher on {socket.gethostname()}, of node 0, died" in ended[1][2]
    assert f"resuming from {tmp_path}/parts/checkpoints/step-00000004" in ended[0][1] + ended[0][2]
    once, twice = metric_rows(tmp_path / "whole"), metric_rows(tmp_path / "parts")
    assert [twice[step]["loss"] for step in range(1, STEPS + 1)] == [once[step]["loss"] for step in range(1, STEPS + 1)]


@pytest.mark.slow  # a failure that is loud
def test_a_run_that_fails_again_and_again_ends(tmp_path):
    """A bug in each attempt: one restart, and the status of the last."""
    (tmp_path / "broken.py").write_text(
        "from nxdt_core.api import Component, hookimpl\n"
        "def broken(config, run_dir):\n    raise ZeroDivisionError\n"
        "@hookimpl\ndef nxdt_callbacks():\n    return [Component(name='waits', target='broken:broken')]\n"
    )
    words = arguments(tmp_path, "broken", "trainer.devices=2")
    words = [word.replace("waits.py", "broken.py") for word in words]
    status, out, err = finish(begin(["--max-restarts=1", *words], PYTHONPATH=str(tmp_path)))
    assert status == 1, out + err
    assert err.count("restart 1 of 1") == 1
    assert err.count("Traceback (most recent call last)") == 2


def test_a_mistake_is_not_repeated(tmp_path):
    words = arguments(tmp_path, "mistake", "model.num_layers=0")
    status, _, err = finish(begin(["--max-restarts=3", *words], PYTHONPATH=str(tmp_path)))
    assert (status, "restart" in err) == (2, False), err


@pytest.mark.slow  # tests/launch stops ranks by signals
def test_a_stop_is_no_loss(tmp_path, metric_rows):
    process = begin(
        ["--max-restarts=3", *arguments(tmp_path, "stopped", "trainer.devices=2")], PYTHONPATH=str(tmp_path)
    )
    wait_until(lambda: all((tmp_path / f"reached-{rank}").exists() for rank in range(2)), [process])
    for pid in family(process.pid):  # a scheduler signals all of them
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "lost").touch()
    status, out, err = finish(process)
    assert (status, "restart" in err) == (128 + signal.SIGTERM, False), out + err
    assert (tmp_path / f"stopped/checkpoints/step-{max(metric_rows(tmp_path / 'stopped')):08d}/manifest.json").exists()


@pytest.mark.slow  # a mistake that is loud
def test_two_launchers_with_the_number_of_one_node_are_refused(tmp_path):
    port = free_port()
    first = begin_node(0, tmp_path, port)
    second = begin_node(1, tmp_path, port)
    wait_until(lambda: (tmp_path / "reached-1").exists(), [first, second])
    place = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NXDT_JOIN_TIMEOUT_S": "2"}
    words = arguments(tmp_path, "parts", "trainer.num_nodes=2", "trainer.devices=1")
    status, _, err = finish(begin(words, PYTHONPATH=str(tmp_path), **place))
    assert (status, "[NXDT-P122]" in err) == (2, True), err
    (tmp_path / "lost").touch()
    assert [finish(each)[0] for each in (first, second)] == [0, 0]
