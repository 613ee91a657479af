"""Launchers that are killed before their ranks are connected: the ranks end with them, on every node."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nxdt_core.system.parent import PARENT_VARIABLE
from tests import processes
from tests.launch import launching
from tests.launch.launching import finish, gone, wait_for_rows, words

SLOW_RANKS = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(1000)

if "RANK" in os.environ:
    open(os.environ["BEGUN"] + os.environ["RANK"], "w").close()
    if os.environ["SLOW"] == "interpreter":
        time.sleep(1)
    else:
        sys.meta_path.insert(0, Slow())
"""
"""A ``sitecustomize`` of ranks that need long for their first steps, as on a file system that is slow."""
DEADLINE_S = 10


_seen = []


@pytest.fixture(autouse=True)
def all_ended():
    """End what a test that failed has left."""
    yield
    for pid in _seen:
        with suppress(OSError):
            if b"nxdt" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _seen.clear()


def start(*arguments, **more):
    process = launching.start(*arguments, **more)
    _seen.append(process.pid)
    return process


def ranks_of(process):
    found = launching.ranks_of(process)
    _seen.extend(found)
    return found


def slow_ranks(where, what="torch"):
    (where / "sitecustomize.py").write_text(SLOW_RANKS)
    return {"popen": subprocess.Popen, "PYTHONPATH": str(where), "SLOW": what, "BEGUN": f"{where}/begun-"}


def wait_for(true, *started):
    end = time.monotonic() + 60
    while not true():
        assert all(process.poll() is None for process in started), [process.communicate() for process in started]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(tmp_path):
    """One launcher before its ranks run a line of nxdt, another while they import torch."""
    folders = {what: tmp_path / what for what in ("interpreter", "torch")}
    launchers = {}
    for what, folder in folders.items():
        folder.mkdir()
        launchers[what] = start(words(folder, "trainer.devices=2"), **slow_ranks(folder, what))
    for what, launcher in launchers.items():
        wait_for(lambda begun=folders[what]: len(list(begun.glob("begun-*"))) == 2, launcher)
        ranks = ranks_of(launcher)
        time.sleep(0.5 if what == "torch" else 0)  # until they import it
        launcher.kill()
        assert len(ranks) == 2
        assert gone(ranks, DEADLINE_S), what
        launcher.communicate()


def test_ranks_end_with_a_launcher_that_is_killed_while_they_join(tmp_path):
    """It is stopped first, so that it answers none of them."""
    launcher = start(words(tmp_path, "trainer.devices=2"))
    wait_for(lambda: len(ranks_of(launcher)) == 2, launcher)
    launcher.send_signal(signal.SIGSTOP)
    ranks = ranks_of(launcher)
    time.sleep(0.5)
    launcher.kill()
    assert gone(ranks, DEADLINE_S)
    launcher.communicate()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_ends_with_its_parent_on_every_platform(platform):
    """Where the kernel has no signal for that, a thread watches the parent."""
    child = f"import sys, time; sys.platform = {platform!r}\n"
    child += "from nxdt_core.system.parent import end_with_parent; end_with_parent(); print('ready', flush=True)\n"
    child += "time.sleep(1000)"
    parent = f"import os, subprocess, sys; os.environ[{PARENT_VARIABLE!r}] = str(os.getpid())\n"
    parent += f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); print(child.pid, flush=True); child.wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert gone([pid], DEADLINE_S)
    process.communicate()


def test_a_run_ends_with_the_process_that_would_start_it_again(tmp_path):
    resume = ("checkpoint.resume_if_exists=true", "checkpoint.resume_ignore_no_checkpoint=true")
    arguments = words(tmp_path, "trainer.devices=2", "trainer.max_steps=100000", "name=again", *resume)
    process = start(["--max-restarts=1", *arguments])
    wait_for_rows(tmp_path / "again" / "metrics.jsonl", 1, process)
    (launcher,) = ranks_of(process)
    with open(f"/proc/{launcher}/task/{launcher}/children") as children:
        ranks = [int(pid) for pid in children.read().split()]
    _seen.extend(ranks)
    process.kill()
    assert gone([launcher, *ranks], DEADLINE_S)
    process.communicate()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_is_killed_ends_all_nodes_while_ranks_are_still_to_come(tmp_path, killed):
    """Those of node 1 are slow."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    arguments = words(tmp_path, "trainer.num_nodes=2", "trainer.devices=1", "name=nodes")
    nodes = [start(arguments, NODE_RANK="0", **meeting)]
    nodes.append(start(arguments, NODE_RANK="1", **meeting, **slow_ranks(tmp_path)))
    wait_for(lambda: (tmp_path / "begun-1").exists() and ranks_of(nodes[0]), *nodes)
    ranks = [rank for node in nodes for rank in ranks_of(node)]
    nodes[killed].kill()
    status, _, err = finish(nodes[1 - killed], DEADLINE_S + 5)
    assert status == 1
    here = socket.gethostname()
    if killed == 0:
        assert f"Node 1 ended with the run, since the launcher on {here}, of node 0, died." in err
    else:
        assert f"[NXDT-P048] Rank 1 on {here} died with its launcher" in err
    assert gone(ranks, DEADLINE_S)
    nodes[killed].communicate()


def test_a_launcher_leaves_the_environment_of_its_process_as_it_was(tmp_path):
    """Else each command that the process starts afterwards would be killed, as a rank whose launcher has ended."""
    script = tmp_path / "runs.py"
    lines = (
        "import os, sys",
        f"names = {(PARENT_VARIABLE, 'OMP_NUM_THREADS')!r}",
        "for name in names:",
        "    os.environ.pop(name, None)",
        "from nxdt_core.cli import main",
        "assert main(sys.argv[1:]) == 0",
        "assert [name for name in names if name in os.environ] == []",
    )
    script.write_text("\n".join(lines))
    command = [sys.executable, str(script), "train", *words(tmp_path, "trainer.max_steps=1", "trainer.devices=2")]
    done = processes.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_without_a_launcher_does_not_end_with_its_parent(tmp_path):
    """A shell may end before a run that it has started in the background."""
    started = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=-3, stderr=-3).pid)"
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\nfrom nxdt_core.system.parent import end_with_parent\nend_with_parent()\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", started, sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    pid = int(done.stdout)
    time.sleep(1)
    assert not gone([pid], 0.2)
    os.kill(pid, signal.SIGKILL)
