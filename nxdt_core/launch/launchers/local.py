"""Launchers without a scheduler: nodes on this machine, torchrun and others with its variables, and MPI."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping

from nxdt_core.distributed.environment import join_mpi, join_torchrun
from nxdt_core.launch.launchers.config import LocalOptions, exports, header, program
from nxdt_core.protocols.launcher import Job, Launcher, RankEnvironment, Submission

_SCRIPT = "job.sh"
_NODES = """\
node() {{
    export NODE_RANK=$1
    while true; do
        {{ {command}; }} >> "$logs/node-$1.log" 2>&1
        status=$?
        # A launcher that was killed is a lost node: another takes its place.
        if [ "$status" -ne 137 ]; then exit "$status"; fi
    done
}}
status=0
for number in $(seq 1 {last}); do node "$number" & done
node 0 &
for process in $(jobs -p); do wait "$process" || status=$?; done
exit "$status"
"""


class LocalLauncher(Launcher):
    """This machine alone: processes that something else has started are not looked at."""

    def submission(self, job: Job, options: LocalOptions) -> Submission:
        """Return a script that starts a launcher for each node, and another where one is killed."""
        restarts = [job.train[0], f"--max-restarts={options.max_restarts}", *job.train[1:]]
        calls = [[*program(options), *words] for words in (job.compile, restarts) if words]
        command = " && ".join(map(shlex.join, calls))
        lines = [
            "#!/bin/bash",
            *header(job),
            "set -u",
            f"logs={shlex.quote(str(job.directory / 'logs'))}",
            f"cd {shlex.quote(str(job.working_directory))} || exit 1",
            *exports({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port), **options.variables()}),
            *_NODES.format(command=command, last=job.nodes - 1).splitlines(),
        ]
        return Submission(files={_SCRIPT: "\n".join(lines) + "\n"}, command=("bash", _SCRIPT))


class EnvironmentLauncher(Launcher):
    """``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``."""

    def join(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return the place that the usual variables say."""
        return join_torchrun(environment, socket.gethostname())


class MPILauncher(Launcher):
    """Variables of ``mpirun``."""

    def join(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return the place that MPI's variables say."""
        return join_mpi(environment, socket.gethostname())
