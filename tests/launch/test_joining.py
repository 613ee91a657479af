"""Which launcher started a process, by the variables that it set; and variables that contradict each other."""

from __future__ import annotations

import os
import sys

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.errors.launch import LaunchersDisagree, NotStartedByLauncher
from nxdt_core.errors.ranks import BadLaunchVariable, LaunchEnvironmentIncomplete
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.launcher import Launcher
from tests import processes
from tests.launch.launching import environment
from tests.train.small import SMALL

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
    "MASTER_ADDR": "node0",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
"""Slurm's variables for the script that calls mpirun, which each of its processes inherits."""
SLURM = {**BATCH, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_STEP_ID": "0"}
USUAL = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}


def test_processes_of_open_mpi_join():
    place = read_rank_environment(OMPI)
    assert (place.rank, place.world_size, place.local_rank, place.launcher) == (3, 4, 1, "MPI")
    other = read_rank_environment({**OMPI, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (other.master_addr, other.master_port) == (place.master_addr, place.master_port)
    again = read_rank_environment({**OMPI, "PMIX_NAMESPACE": "prterun-2"})
    assert again.master_port != place.master_port


def test_processes_of_pmi_on_one_host_join():
    place = read_rank_environment(PMI)
    assert (place.rank, place.world_size, place.master_addr, place.master_port) == (1, 2, "127.0.0.1", 29500)


def test_mpirun_in_a_slurm_job_wins_over_slurms_variables_of_the_script():
    place = read_rank_environment({**SLURM, **OMPI})
    assert (place.rank, place.launcher) == (3, "MPI")
    named = read_rank_environment({**SLURM, **{name: OMPI[name] for name in OMPI if name != "MASTER_ADDR"}})
    assert named.master_addr == "node1"


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MASTER_ADDR", "PMIX_NAMESPACE"]
)
def test_a_missing_variable_of_mpi_is_named(name):
    missing = "MASTER_PORT" if name == "PMIX_NAMESPACE" else name
    with raises(LaunchEnvironmentIncomplete, match=missing):
        read_rank_environment({key: value for key, value in OMPI.items() if key != name})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4 among 4 processes"),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is 2 among 2 processes"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4 in a step of 4 tasks"),
        ({**SLURM, "SLURM_LOCALID": "9"}, "SLURM_LOCALID is 9"),
        ({**USUAL, **SLURM}, "RANK is 1 of 4, and Slurm says rank 0"),
        ({**USUAL, **OMPI, "MASTER_ADDR": "a"}, "RANK is 1 of 4, and MPI says rank 3"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed, said):
    with raises(LaunchersDisagree, match="NXDT-P110") as refused:
        read_rank_environment(changed)
    assert said in str(refused.value)
    assert read_rank_environment({**changed, "NXDT_LAUNCHER": "local"}).world_size == 1


def test_the_script_of_a_batch_job_is_no_task_of_it():
    """Otherwise it would wait for ranks that nothing starts."""
    assert read_rank_environment({**BATCH, "SLURM_JOB_NODELIST": "node[1-2]"}).world_size == 1


def test_ranks_of_an_agent_may_be_numbered_otherwise_than_the_tasks_around_it():
    assert read_rank_environment({**USUAL, **SLURM, "TORCHELASTIC_RUN_ID": "1"}).rank == 1


def test_a_wrong_number_is_named():
    with raises(BadLaunchVariable, match="OMPI_COMM_WORLD_SIZE is 'two'"):
        read_rank_environment({**OMPI, "OMPI_COMM_WORLD_SIZE": "two"})
    with raises(BadLaunchVariable, match="LOCAL_RANK is '7'"):
        read_rank_environment({**USUAL, "LOCAL_RANK": "7"})


def test_a_named_launcher_is_the_only_one_that_counts():
    everything = {**SLURM, **OMPI, **USUAL}
    assert read_rank_environment({**everything, "NXDT_LAUNCHER": "mpi"}).rank == 3
    assert read_rank_environment({**everything, "NXDT_LAUNCHER": "slurm"}).rank == 0
    assert read_rank_environment({**everything, "NXDT_LAUNCHER": "torchrun"}).rank == 1
    with raises(NotStartedByLauncher, match="NXDT_LAUNCHER is 'mpi'"):
        read_rank_environment({**SLURM, "NXDT_LAUNCHER": "mpi"})


def test_one_task_per_node_is_a_node_where_nodes_are_numbered():
    """Then nxdt starts the processes of the node; without a number, the task is a rank."""
    task = {**SLURM, "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "1"}
    numbered = {**task, "NODE_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert read_rank_environment(task).world_size == 2
    assert read_rank_environment(numbered).world_size == 1
    assert read_rank_environment({**numbered, "SLURM_NTASKS": "8"}).world_size == 8
    process = {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "NODE_RANK": "3"}
    assert read_rank_environment({**process, "MASTER_PORT": "29500"}).world_size == 1


def test_every_launcher_of_the_core_is_one():
    for component in Kernel.start().registry.all("launcher"):
        assert component.load_class(Launcher)().join({}) is None


def train_under_mpi(arguments):
    """As a process of ``mpirun``, which sets no other variables."""
    from nxdt_core.cli import main

    number = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        del os.environ[name]
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": number, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    os.environ.update({"OMPI_COMM_WORLD_RANK": number, "OMPI_COMM_WORLD_SIZE": "2", **local})
    return main(arguments)


def test_processes_of_mpirun_train_together(tmp_path, metric_rows):
    arguments = ["train", "recipe:llama-tiny", *SMALL, "checkpoint.enabled=false"]
    arguments += ["trainer.devices=2", "trainer.max_steps=2", "name=mpi", f"exp_manager.exp_dir={tmp_path}"]
    assert RankPool(2).run(train_under_mpi, arguments, timeout_s=90) == [0, 0]
    assert sorted(metric_rows(tmp_path / "mpi")) == [1, 2]


PLUGIN = """
import socket
from nxdt_core.api import Component, hookimpl
from nxdt_core.protocols.launcher import Launcher, RankEnvironment

class Acme(Launcher):
    def join(self, environment):
        if "ACME_TASK" not in environment:
            return None
        return RankEnvironment(rank=int(environment["ACME_TASK"]), world_size=2, host=socket.gethostname(),
                     master_addr="127.0.0.1", master_port=1, launcher="Acme")

    def submission(self, job, options): ...

@hookimpl
def nxdt_launchers():
    return [Component(name="acme", target="acme:Acme")]
"""


def test_a_launcher_of_a_plugin_is_asked_where_it_is_named(tmp_path):
    """It says two ranks, and the configuration one."""
    (tmp_path / "acme.py").write_text(PLUGIN)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nxdt.plugins]\nacme = acme\n")

    def run(**variables):
        words = [
            sys.executable,
            "-m",
            "nxdt_core",
            "train",
            "recipe:llama-tiny",
            *SMALL,
            f"exp_manager.exp_dir={tmp_path}",
        ]
        env = environment(PYTHONPATH=str(tmp_path), NXDT_JOIN_TIMEOUT_S="1", **variables)
        return processes.run(words, capture_output=True, text=True, env=env, check=False)

    done = run(NXDT_LAUNCHER="acme", ACME_TASK="1")
    assert (done.returncode, "rank 1" in done.stderr, "[NXDT-P045]" in done.stderr) == (2, True, True), done.stderr
    done = run(NXDT_LAUNCHER="acme")
    assert (done.returncode, "[NXDT-P111]" in done.stderr) == (2, True), done.stderr
    done = run(NXDT_LAUNCHER="acne", ACME_TASK="1")
    assert (done.returncode, "[NXDT-K002]" in done.stderr, "'acme'" in done.stderr) == (2, True, True), done.stderr
