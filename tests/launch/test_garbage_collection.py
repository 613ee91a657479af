"""``trainer.gc_interval``: where in a run Python's garbage collector runs, as its own callbacks report it; and at its
end."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from nxdt_core.distributed.device_operations import DeviceOperations
from nxdt_core.distributed.devices import HOST, PROFILES
from nxdt_core.run import train
from nxdt_core.train.state import free_earlier_runs
from tests.launch.launching import finish, start, words
from tests.sampling import slow

RECORDER = """
import gc
import json
import os
import sys

from nxdt_core.api import Callback, Component, hookimpl


class Recorder(Callback):
    def __init__(self, config, run_dir):
        self.file = run_dir / f"collections-{os.environ.get('RANK', 0)}.json"
        self.collections, self.in_step, self.step = [], False, 0

    def on_fit_start(self, run):
        gc.set_threshold(50, 2, 2)  # of its own accord Python then collects in each step
        gc.callbacks.append(self.collected)
        self.frozen = gc.get_freeze_count()
        self.run, self.take_step, run.session.step = run, run.session.step, self.recorded

    def recorded(self, *args, **kwargs):
        self.in_step, self.step = True, self.run.step + 1
        try:
            return self.take_step(*args, **kwargs)
        finally:
            self.in_step = False

    def on_fit_end(self, run):
        gc.callbacks.remove(self.collected)
        frozen = gc.get_freeze_count() - self.frozen
        self.file.write_text(json.dumps({"collections": self.collections, "frozen": frozen}))

    def collected(self, phase, info):
        if phase == "start":
            self.collections.append([self.step, self.in_step, info["generation"]])


@hookimpl
def nxdt_callbacks():
    return [Component(name="recorder", target="recorder:Recorder", summary="Records collections.")]
"""


@pytest.mark.parametrize(("interval", "devices"), [slow(2, 2), (0, 1)])
def test_ranks_collect_after_the_same_steps_and_never_within_one(interval, devices, tmp_path):
    """By default ``test_session.py`` shows after which steps the collector runs, and that it runs in none."""
    plugin = tmp_path / "recorder.py"
    plugin.write_text(RECORDER)
    process = start(
        words(
            tmp_path,
            *("name=run", f"trainer.devices={devices}", "trainer.max_steps=5", f"trainer.gc_interval={interval}"),
            *(f"plugins.local=[{plugin}]", "trainer.callbacks=[recorder]"),
        ),
        PYTHONPATH=str(tmp_path),
    )
    status, _, err = finish(process)
    assert status == 0, err
    for rank in range(devices):
        found = json.loads((tmp_path / "run" / f"collections-{rank}.json").read_text())
        within = [step for step, in_step, _ in found["collections"] if in_step]
        if interval:
            training = [collection for collection in found["collections"] if collection[0] > 0]
            assert training == [[1, False, 2], [2, False, 2], [4, False, 2]]
            assert found["frozen"] > 1_000
        else:
            assert set(within) == {1, 2, 3, 4, 5}
            assert found["frozen"] <= 0


def test_the_profile_has_the_default_and_the_collector_works_as_before_once_the_run_has_ended(small_run):
    enabled = []

    def collected(phase, info):
        if phase == "start":
            enabled.append(gc.isenabled())

    enabled_before = gc.isenabled()
    gc.freeze()  # as Python 3.12 itself does with a few objects
    gc.callbacks.append(collected)
    try:
        with patch.dict(PROFILES, {HOST.type: replace(PROFILES[HOST.type], gc_interval=1)}):
            train(small_run("trainer.max_steps=3", "checkpoint.enabled=false"))
    finally:
        gc.callbacks.remove(collected)
    assert enabled.count(False) == 3
    assert (gc.isenabled(), gc.get_freeze_count()) == (enabled_before, 0)


AFTER_A_COMMAND = """
from nxdt_core.cli import main

class Cycle:
    def __init__(self, name):
        self.name, self.itself = name, self

    def __del__(self):
        print(self.name)

main(["--help"])
kept = Cycle("kept")
Cycle("dropped")
"""


def test_the_end_of_a_process_collects_once():
    """What is garbage by then is closed; what is in use goes with the process."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_COMMAND], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line in ("kept", "dropped")] == ["dropped"]


@pytest.mark.parametrize(("held", "freed"), [(0, False), (None, False), (1, True)])
def test_what_earlier_runs_left_on_an_accelerator_is_freed(held, freed, monkeypatch):
    class Operations(DeviceOperations):
        def max_memory_bytes(self, device):
            return held

    class Cycle:
        pass

    profile = replace(PROFILES["cuda"], device_type="meta", operations=Operations())
    monkeypatch.setitem(PROFILES, "meta", profile)
    left = Cycle()
    left.itself = left
    gone = weakref.ref(left)
    gc.disable()
    del left
    try:
        free_earlier_runs(torch.device("meta"))
        assert (gone() is None) == freed
    finally:
        gc.enable()
