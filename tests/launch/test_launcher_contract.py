"""Every launcher of the core keeps what nxdt asks of all."""

from __future__ import annotations

from typing import ClassVar

import pytest
from nxdt_testing.launcher_contract import LauncherContract

from nxdt_core.builtins import nxdt_launchers
from nxdt_core.kernel.discovery import import_reference

RECORDS = {record.name: record for record in nxdt_launchers()}


def mpi(rank):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-node0-17@1",
        "MASTER_ADDR": "node0",
    }


def slurm(rank):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
    }


def usual(rank):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }


VARIABLES = {"slurm": slurm, "hyperpod": slurm, "environment": usual, "mpi": mpi}


class Builtin(LauncherContract):
    """With its defaults, and an image where containers are needed."""

    record = RECORDS["slurm"]
    given: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def factory(self):
        return import_reference(self.record.target)

    @pytest.fixture
    def options(self):
        return None if self.record.config is None else import_reference(self.record.config)(**self.given)

    @pytest.fixture
    def environments(self):
        return [VARIABLES[self.record.name](rank) for rank in range(4)]


def contract(name, **given):
    record = RECORDS[name]
    return type("Contract", (Builtin,), {"record": record, "given": given})


TestSlurm = contract("slurm")
TestSlurmByNode = contract("slurm", tasks="node", image="registry/nxdt:1")
TestKubernetes = contract("kubernetes", image="registry/nxdt:1")
TestTrainJob = contract("kubernetes", image="registry/nxdt:1", workload="trainjob")
TestPyTorchJob = contract("kubernetes", image="registry/nxdt:1", workload="pytorchjob")
TestHyperPod = contract("hyperpod")
TestHyperPodOnEKS = contract("hyperpod", image="registry/nxdt:1", orchestrator="eks")
TestLocal = contract("local")
TestEnvironment = contract("environment")
TestMPI = contract("mpi")


def test_every_launcher_is_under_the_contract():
    tested = {each.record.name for each in globals().values() if isinstance(each, type) and issubclass(each, Builtin)}
    assert tested == RECORDS.keys()
