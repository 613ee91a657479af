"""The records of the core's launchers."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["LAUNCHERS"]

_HERE = "nxdt_core.launch.launchers"
_JOIN, _SUBMIT = frozenset({"join"}), frozenset({"submit"})

LAUNCHERS = (
    Component(
        name="slurm",
        target=f"{_HERE}.slurm:SlurmLauncher",
        config=f"{_HERE}.config:SlurmOptions",
        capabilities=_JOIN | _SUBMIT,
        summary="batch jobs of Slurm, and tasks of srun",
    ),
    Component(
        name="kubernetes",
        target=f"{_HERE}.kubernetes:KubernetesLauncher",
        config=f"{_HERE}.config:KubernetesOptions",
        capabilities=_SUBMIT,
        summary="Kubernetes: indexed Job, or Kubeflow's TrainJob and PyTorchJob",
    ),
    Component(
        name="hyperpod",
        target=f"{_HERE}.hyperpod:HyperPodLauncher",
        config=f"{_HERE}.config:HyperPodOptions",
        capabilities=_JOIN | _SUBMIT,
        summary="SageMaker HyperPod with Slurm or EKS",
    ),
    Component(
        name="local",
        target=f"{_HERE}.local:LocalLauncher",
        config=f"{_HERE}.config:LocalOptions",
        capabilities=_SUBMIT,
        summary="nodes as processes of this machine",
    ),
    Component(
        name="environment",
        target=f"{_HERE}.joined:EnvironmentLauncher",
        aliases=("torchrun",),
        capabilities=_JOIN,
        summary="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
    ),
    Component(
        name="mpi",
        target=f"{_HERE}.joined:MPILauncher",
        capabilities=_JOIN,
        summary="variables of mpirun: Open MPI, MVAPICH, MPICH, Intel MPI",
    ),
)
