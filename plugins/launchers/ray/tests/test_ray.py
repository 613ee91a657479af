"""A run as actors of Ray: files of the job, a run of two nodes on a local Ray, killed and resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from nxdt_plugin_ray.config import RayOptions
from nxdt_plugin_ray.driver import RayLauncher
from nxdt_testing.launcher_contract import LauncherContract

from nxdt_core.protocols.launcher import Launcher
from tests import in_the_way, processes
from tests.launch import waits
from tests.train.small import SMALL

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray")
DEADLINE_S = 800
"""Ray starts a dozen processes, and this run starts eight."""
STEPS = 8


class TestRay(LauncherContract):
    """All tests are inherited."""

    name = "ray"

    @pytest.fixture
    def factory(self):
        return RayLauncher

    @pytest.fixture
    def options(self):
        return RayOptions(gpus_per_node=2)


@pytest.fixture
def launch(tmp_path):
    """Write a job of a run with two nodes; its driver."""
    shutil.copy(waits.__file__, tmp_path)
    keys = [f"trainer.max_steps={STEPS}", "checkpoint.every_n_train_steps=2", "trainer.callbacks=[waits]"]
    keys += [f"plugins.local=[{tmp_path / 'waits.py'}]", f"exp_manager.exp_dir={tmp_path}", "name=run"]

    def write(*options):
        words = ["-m", "nxdt_core", "launch", "ray", "recipe:llama-tiny", *SMALL, *keys, "--nodes", "2", *options]
        done = processes.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return tmp_path / "launch/run/job.py"

    return write


def start(driver, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **variables}
    return processes.Popen(
        [sys.executable, str(driver)], cwd=driver.parent, env=environment, stdout=-1, stderr=-1, text=True
    )


def wait_until(true, process):
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


def of_node(number, where):
    """Processes of a node of the run below ``where``: launcher and ranks, and the actor that started them."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            words, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if str(where).encode() in words and b"nxdt_" in words and f"NODE_RANK={number}\0".encode() in variables:
            found |= {int(entry.name), parent}
    return found


def test_it_is_a_launcher_that_submits_only():
    assert isinstance(RayLauncher(), Launcher)
    assert RayLauncher().join({"NODE_RANK": "1"}) is None


def test_the_driver_has_the_run_and_the_resources(launch):
    driver = launch("--cpus-per-node", "2", "--resources", "neuron_cores=32", "--environment", "A=b c")
    work = json.loads(json.dumps(runpy.run_path(str(driver))["WORK"]))
    assert (work["nodes"], work["bundle"]) == (2, {"CPU": 2.0, "neuron_cores": 32.0})
    assert (work["strategy"], work["environment"]) == ("STRICT_SPREAD", {"A": "b c"})
    (command,) = work["commands"]
    assert command[:2] == ["train", "recipe:llama-tiny"]
    assert {"trainer.num_nodes=2", "checkpoint.resume_if_exists=true"} <= set(command)


def test_without_ray_the_driver_says_what_to_install(launch, tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/ray.py").write_text("raise ImportError('no module named ray')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path / "hidden"), os.environ.get("PYTHONPATH")]))
    process = start(launch(), PYTHONPATH=path)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("[NXDT-P130] Ray cannot be imported: no module named ray.\n  Install it")


@pytest.mark.parametrize("kind", in_the_way.KINDS)
def test_the_log_of_a_node_is_not_written_through_what_stands_in_its_place(launch, tmp_path, kind):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/ray.py").write_text("")
    driver = launch()
    precious = in_the_way.put(kind, driver.parent / "logs/node-1.log", tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path / "hidden"), os.environ.get("PYTHONPATH")]))
    process = start(driver, PYTHONPATH=path)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, err
    assert "NXDT-P117" in err
    assert in_the_way.KINDS[kind] in err
    assert precious.read_text() == in_the_way.PRECIOUS


def test_what_an_actor_starts_ends_with_the_actor_even_before_its_first_line():
    command = [sys.executable, "-m", "nxdt_plugin_ray.child", "--version"]
    for parent, status in ((os.getpid(), 0), (1, -signal.SIGTERM)):
        assert processes.run(command, env={**os.environ, "NXDT_PARENT": str(parent)}).returncode == status


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_two_workers_resumes_after_one_is_killed(launch, tmp_path):
    driver = launch("--address", "local", "--strategy", "PACK", "--max-restarts", "2", "--cpus-per-node", "0.5")
    process = start(driver, PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    kept = tmp_path / "run/checkpoints/step-00000004/manifest.json"
    wait_until(lambda: kept.exists() and all((tmp_path / f"reached-{rank}").exists() for rank in range(2)), process)
    lost = of_node(1, tmp_path)
    assert len(lost) >= 3
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "lost").touch()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out + err
    assert "restart 1 of 2 from the newest checkpoint" in out
    assert "resuming from" in (driver.parent / "logs/node-0.log").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [*range(1, STEPS + 1)]
