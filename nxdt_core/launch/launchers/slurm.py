"""Slurm: joins the tasks of ``srun``, and writes a batch script that compiles, trains, and requeues itself.
SageMaker HyperPod: Slurm or EKS, where a node that fails is replaced and the job resumes.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence

from nxdt_core.distributed.environment import join_slurm
from nxdt_core.launch.launchers.config import HyperPodOptions, SlurmOptions, exports, header, program
from nxdt_core.launch.launchers.kubernetes import manifests
from nxdt_core.protocols.launcher import Job, Launcher, RankEnvironment, Submission

_SCRIPT = "job.sbatch"
_HEALTHY = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
"""Label of nodes that HyperPod has checked."""
_BEGIN = """\
# Slurm signals this shell if the job is cancelled or requeued, and the tasks alone before the limit of time.
ended=0
trap 'ended=1' TERM
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST"
"""

_NODE_VARIABLES = """\
# Where the launchers of the nodes meet: each starts the processes of its devices.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((12000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
"""

_REQUEUE = """\
# 0: done. 2: a mistake, which a restart would repeat. 143: stopped with a checkpoint, as before the limit of time.
if [ "$status" -eq 0 ] || [ "$status" -eq 2 ] || [ "$ended" -eq 1 ]; then
    exit "$status"
fi
if [ "$status" -ne 143 ]; then
    failures=$(($(cat "$logs/$SLURM_JOB_ID.failures" 2>/dev/null || echo 0) + 1))
    echo "$failures" > "$logs/$SLURM_JOB_ID.failures"
    if [ "$failures" -gt {limit} ]; then
        echo "status $status: failed $failures times, not requeued"
        exit "$status"
    fi
fi
echo "status $status: requeued, resumes from the newest checkpoint"
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


class SlurmLauncher(Launcher):
    """``sbatch`` and ``srun``."""

    def join(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return the place of a task of ``srun``."""
        return join_slurm(environment, socket.gethostname())

    def submission(self, job: Job, options: SlurmOptions) -> Submission:
        """Return a batch script."""
        return Submission(files={_SCRIPT: _batch_script(job, options)}, command=("sbatch", _SCRIPT))


class HyperPodLauncher(SlurmLauncher):
    """Slurm with ``--auto-resume``, or a PyTorchJob that HyperPod resumes."""

    def submission(self, job: Job, options: HyperPodOptions) -> Submission:  # type: ignore[override]
        """Return a batch script, or the manifests for EKS."""
        if options.orchestrator == "slurm":
            script = _batch_script(job, options.changed(exclusive=True), ["--auto-resume=1"])
            return Submission(files={_SCRIPT: script}, command=("sbatch", _SCRIPT))
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


def _batch_script(job: Job, options: SlurmOptions, srun_options: Sequence[str] = ()) -> str:
    """Return the text of a batch script; ``srun_options`` are further options of the ``srun`` that trains."""
    tasks = options.tasks or ("node" if job.needs_agent else "device")
    by_node = tasks == "node"
    logs = job.directory / "logs"
    compile_first = [
        "# Compile the graphs, so that the first step finds them.",
        _srun(job.compile, options, by_node=True),
        "status=$?",
        'if [ "$status" -ne 0 ]; then exit "$status"; fi',
    ]
    values = {"partition": options.partition, "account": options.account, "time": options.time}
    words = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={1 if by_node else job.devices}",
        *(f"--{name}={value}" for name, value in values.items() if value is not None),
        *(["--exclusive"] if options.exclusive else []),
        f"--output={logs!s}/%x-%j.log",
        "--open-mode=append",
        f"--signal=TERM@{options.signal_s}",
        "--requeue" if options.requeue else "--no-requeue",
        *options.sbatch,
    ]
    lines = [
        "#!/bin/bash",
        *header(job),
        *[f"#SBATCH {word}" for word in words],
        "set -uo pipefail",
        f"logs={shlex.quote(str(logs))}",
        f"cd {shlex.quote(str(job.working_directory))} || exit 1",
        *exports(options.variables()),
        *options.setup,
        *_BEGIN.splitlines(),
        *(_NODE_VARIABLES.splitlines() if by_node or job.compile else ()),
        *(compile_first if job.compile else ()),
        _srun(job.train, options, srun_options, by_node=by_node),
        "status=$?",
        *(_REQUEUE.format(limit=options.max_requeues).splitlines() if options.requeue else ['exit "$status"']),
    ]
    return "\n".join(lines) + "\n"


def _srun(arguments: Sequence[str], options: SlurmOptions, more: Sequence[str] = (), *, by_node: bool) -> str:
    words = ["srun", "--label", "--kill-on-bad-exit=0", "--cpu-bind=none", *more]
    if options.image is not None:
        words += [f"--container-image={options.image}"]
        mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]
        words += [f"--container-mounts={','.join(mounts)}"] if mounts else []
    command = [*program(options), *arguments]
    if not by_node:
        return shlex.join([*words, *command])
    script = f"NODE_RANK=$SLURM_NODEID exec {shlex.join(command)}"
    return f'{shlex.join(words)} --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c {shlex.quote(script)}'
