"""Runs of several processes that tests start from the command line, and faults in the middle of them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes
from tests.train.small import SMALL

ARGUMENTS = (*SMALL, "checkpoint.enabled=false")
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")

FAULTY = """
import os, signal, time
from nxdt_core.api import Callback, Component, hookimpl

BUGS = {"raise": ValueError("a made-up bug"), "no-memory": MemoryError()}

class Faulty(Callback):
    def __init__(self, config, run_dir): ...

    def on_fit_start(self, run):
        self.on_step_end(run)

    def on_step_end(self, run):
        fault, rank, step = os.environ["FAULT"].split()
        if fault in BUGS and (int(rank), int(step)) == (run.rank, run.step + 1):
            run.session.step = lambda *_, **__: self.fail(BUGS[fault])
        if fault in BUGS or int(step) != run.step:
            return
        if fault == "SIGSTOP":
            time.sleep(float(os.environ["FAULT_S"]))  # on all ranks, until each has sent a heartbeat in this step
        if int(rank) != run.rank:
            return
        if fault == "sleep":
            time.sleep(1000)
        if fault == "compute":
            end = time.monotonic() + float(os.environ["FAULT_S"])
            while time.monotonic() < end:
                if time.monotonic() % 0.2 > 0.06:  # a third of a core is enough
                    time.sleep(0.02)
            return
        os.kill(os.getpid(), signal.Signals[fault])

    def fail(self, error):
        raise error

@hookimpl
def nxdt_callbacks():
    return [Component(name="faulty", target="faulty:Faulty", summary="Fails where a test wants it.")]
"""


def words(tmp_path, *more):
    return ["recipe:llama-tiny", *ARGUMENTS, f"exp_manager.exp_dir={tmp_path}", *more]


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**kept, **more}


def start(arguments, *, before=("-m", "nxdt_core", "train"), popen=processes.Popen, **more):
    return popen(
        [sys.executable, *before, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        preexec_fn=processes.take_interrupts,
    )


def finish(process, timeout_s=120):
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not ended within {timeout_s} s\n{out}\n{err}")
    return process.returncode, out, err


def faulty(tmp_path, fault, *more, **settings):
    (tmp_path / "faulty.py").write_text(FAULTY)
    named = (f"plugins.local=[{tmp_path / 'faulty.py'}]", "trainer.callbacks=[faulty]")
    arguments = words(tmp_path, "trainer.devices=2", "trainer.max_steps=100000", *named, *more)
    return start(arguments, FAULT=fault, PYTHONPATH=str(tmp_path), **settings)


def wait_for_rows(path, count, process, deadline_s=120):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no {count} rows in {path} after {deadline_s} s")


def ranks_of(launcher):
    """Process ids of a launcher's ranks, which are sessions of their own."""
    with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as children:
        pids = [int(pid) for pid in children.read().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() != processes.SPARE]


def gone(pids, deadline_s=15):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}") and state(pid) != "Z"]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
