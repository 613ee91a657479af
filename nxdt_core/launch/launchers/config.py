"""Options of the launchers that submit jobs: keys of a cluster file, options of ``nxdt launch``; words of scripts.

Imports no torch.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core import __version__
from nxdt_core.config.section import NonNegativeInt, PositiveInt, Range, Section
from nxdt_core.protocols.launcher import Job

_CORES = "aws.amazon.com/neuroncore"
"""Resource of the Neuron device plugin; it counts cores."""
_GPUS = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One type of instance."""

    devices: int
    """Processes, one per device."""
    efa: int
    """EFA interfaces."""
    resource: str
    """Kubernetes' name of the devices."""
    resources: int
    """Number of these devices on the instance: Kubernetes counts physical cores."""


INSTANCES: Mapping[str, Instance] = {
    "trn1.2xlarge": Instance(devices=2, efa=0, resource=_CORES, resources=2),
    "trn1.32xlarge": Instance(devices=32, efa=8, resource=_CORES, resources=32),
    "trn1n.32xlarge": Instance(devices=32, efa=16, resource=_CORES, resources=32),
    "trn2.48xlarge": Instance(devices=64, efa=16, resource=_CORES, resources=128),
    "p4d.24xlarge": Instance(devices=8, efa=4, resource=_GPUS, resources=8),
    "p4de.24xlarge": Instance(devices=8, efa=4, resource=_GPUS, resources=8),
    "p5.48xlarge": Instance(devices=8, efa=32, resource=_GPUS, resources=8),
    "p5en.48xlarge": Instance(devices=8, efa=16, resource=_GPUS, resources=8),
}
"""Instances by their type without SageMaker's prefix ``ml.``."""


def instance_of(instance_type: str | None) -> Instance | None:
    """Return the facts about an instance type; None where it is unknown."""
    return INSTANCES.get((instance_type or "").removeprefix("ml."))


class ClusterOptions(Section):
    """Options of every cluster."""

    nodes: PositiveInt | None = None
    """Nodes of the run; `--nodes` and `trainer.num_nodes` say the same."""
    devices_per_node: PositiveInt | None = None
    """Devices per node; compared with trainer.devices before anything is written."""
    instance_type: str | None = None
    """EC2 instance of the nodes, such as trn1.32xlarge or ml.p5.48xlarge; decides devices and EFA interfaces."""
    image: str | None = None
    """Container image in which the processes run."""
    mounts: tuple[str, ...] = ()
    """Paths of shared file systems that containers see: /fsx, or /host/path:/path."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Variables for all processes."""
    efa: bool | None = None
    """Set libfabric's variables for EFA; by default where instance_type has EFA interfaces."""
    compile: bool | None = None
    """Compile the graphs first, with nxdt compile; by default where the engine is XLA's or model.compile is true."""
    program: str | None = None
    """Command that calls nxdt on the nodes; by default nxdt in a container, and this Python outside."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse an instance that nothing is known of, and mounts that are not absolute."""
        if self.instance_type is not None and instance_of(self.instance_type) is None:
            raise ValueError(
                f"instance_type is {self.instance_type!r}, of which nothing is known. Write one of "
                f"{', '.join(INSTANCES)}, or leave it out and set devices_per_node and efa"
            )
        for mount in self.mounts:
            if not mount.startswith("/"):
                raise ValueError(f"mounts has {mount!r}. Write an absolute path, or two with a colon between them")

    @property
    def efa_interfaces(self) -> int:
        """EFA interfaces of a node; 0 where EFA is off."""
        instance = instance_of(self.instance_type)
        interfaces = 0 if instance is None else instance.efa
        if self.efa is None:
            return interfaces
        return max(1, interfaces) if self.efa else 0

    def variables(self) -> dict[str, str]:
        """Return the environment of all processes: EFA's, then what is given."""
        efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
        return {**(efa if self.efa_interfaces else {}), **self.environment}


class LocalOptions(ClusterOptions):
    """Nodes that are processes of this machine, to try a run over several nodes."""

    port: Annotated[int, Range(1024, 65535)] = 29500
    """Port of the rendezvous of the nodes."""
    max_restarts: NonNegativeInt = 3
    """Number of restarts of a node's ranks after losses."""


class SlurmOptions(ClusterOptions):
    """A batch job of Slurm."""

    partition: str | None = None
    """Partition of the job."""
    account: str | None = None
    """Account that is charged."""
    time: str | None = None
    """Limit of the job as Slurm writes it: days-hours:minutes:seconds, or minutes."""
    signal_s: PositiveInt = 300
    """Seconds before the limit at which the run is asked to save and stop; then the job is requeued."""
    tasks: Literal["device", "node"] | None = None
    """Tasks that srun starts: one per device, or one per node that starts the others. Default: per node for XLA's
    engines, per device for others."""
    exclusive: bool = True
    """Reserve whole nodes."""
    requeue: bool = True
    """Requeue a job that was stopped or lost a node, and resume."""
    max_requeues: NonNegativeInt = 3
    """Number of requeues of a job after failures. Stops with a checkpoint, as at the limit of time, do not count."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as --qos=high."""
    setup: tuple[str, ...] = ()
    """Shell lines before the run, such as module load or source of an environment."""


class KubernetesOptions(ClusterOptions):
    """A job of Kubernetes with a pod per node."""

    workload: Literal["job", "trainjob", "pytorchjob"] = "job"
    """Kind of object: a plain indexed Job, TrainJob of Kubeflow Trainer 2, or PyTorchJob of the training operator."""
    namespace: str | None = None
    """Namespace of the objects; by default that of kubectl's context."""
    device_resource: str | None = None
    """Name of the devices, such as nvidia.com/gpu; by default that of instance_type."""
    claims: Mapping[str, str] = Field(default_factory=dict)
    """Persistent volume claims and the paths at which pods see them: {fsx-claim: /fsx}."""
    memory: str | None = None
    """Memory of a pod, such as 480Gi."""
    shared_memory: str = "64Gi"
    """Size of /dev/shm."""
    service_account: str | None = None
    """Service account of the pods."""
    node_selector: Mapping[str, str] = Field(default_factory=dict)
    """Labels that nodes must have."""
    grace_s: PositiveInt = 300
    """Seconds that a pod may take to save a checkpoint when it is ended."""
    max_restarts: NonNegativeInt = 3
    """Number of restarts of the nodes, from the newest checkpoint, after losses."""
    port: Annotated[int, Range(1024, 65535)] = 29500
    """Port of the rendezvous of the nodes."""
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""


class HyperPodOptions(SlurmOptions, KubernetesOptions):
    """A job on SageMaker HyperPod, which replaces nodes that fail and resumes the job."""

    orchestrator: Literal["slurm", "eks"] = "slurm"
    """Orchestrator of the cluster."""


def program(options: ClusterOptions, *, module: bool = False) -> list[str]:
    """Return the words that call nxdt on a node.

    Args:
        options: the launcher's options.
        module: as a module behind ``torchrun``, ``-m nxdt_core``.
    """
    if module:
        return ["torchrun", "-m", "nxdt_core"]
    if options.program is not None:
        return shlex.split(options.program)
    return ["nxdt"] if options.image is not None else [sys.executable, "-m", "nxdt_core"]


def header(job: Job) -> list[str]:
    """Return comments that say where a file comes from."""
    return [f"# Written by nxdt {__version__}:", f"#   {job.command_line}"]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
