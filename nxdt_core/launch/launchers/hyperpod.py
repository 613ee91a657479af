"""SageMaker HyperPod: Slurm or EKS, where a node that fails is replaced and the job resumes."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from nxdt_core.distributed.environment import join_slurm
from nxdt_core.launch.launchers.config import HyperPodOptions
from nxdt_core.launch.launchers.kubernetes import manifests
from nxdt_core.launch.launchers.slurm import SCRIPT, batch_script
from nxdt_core.protocols.launcher import Job, Launcher, RankEnvironment, Submission

_HEALTHY = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
"""Label of nodes that HyperPod has checked."""


class HyperPodLauncher(Launcher):
    """Slurm with ``--auto-resume``, or a PyTorchJob that HyperPod resumes."""

    def join(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return the place of a task of ``srun``."""
        return join_slurm(environment, socket.gethostname())

    def submission(self, job: Job, options: HyperPodOptions) -> Submission:
        """Return a batch script, or the manifests for EKS."""
        if options.orchestrator == "slurm":
            script = batch_script(job, options.changed(exclusive=True), ["--auto-resume=1"])
            return Submission(files={SCRIPT: script}, command=("sbatch", SCRIPT))
        annotations = {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": str(options.max_restarts),
        }
        placed = options.changed(
            workload="pytorchjob",
            namespace=options.namespace or "kubeflow",
            node_selector={**_HEALTHY, **options.node_selector},
        )
        return manifests(job, placed, launcher="hyperpod", annotations=annotations)
