"""Kind ``launcher``: what a scheduler says about a process's place in a run, and how a run is submitted to it.

No torch here. A launcher overrides ``join``, ``submission``, or both.

Example::

    class AcmeLauncher(Launcher):
        def join(self, environment):
            if "ACME_TASK" not in environment:
                return None
            return RankEnvironment(
                rank=int(environment["ACME_TASK"]),
                world_size=int(environment["ACME_TASKS"]),
                local_rank=int(environment["ACME_SLOT"]),
                host=socket.gethostname(),
                master_addr=environment["ACME_FIRST_HOST"],
                master_port=29500,
                launcher="Acme",
            )

        def submission(self, job, options):
            script = f"#!/bin/sh\nexec {shlex.join(job.train)}\n"
            return Submission(files={"job.sh": script}, command=("acme", "run", f"--nodes={job.nodes}", "job.sh"))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.errors.launch import CannotSubmit

__all__ = ["Job", "Launcher", "RankEnvironment", "Submission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """This process among all of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this host: the number of its device."""
    host: str
    master_addr: str = ""
    """Host of rank 0."""
    master_port: int = 0
    """Port of the run's store there."""
    store_is_hosted: bool = False
    """True if an agent serves the store; then rank 0 must not."""
    launcher: str = ""
    """Name of the launcher that started this process, for messages; empty where none did."""
    attempt: str = "0"
    """Number of restarts so far, which separates what the attempts leave in an agent's store."""

    def export(self) -> None:
        """Set the usual variables, for libraries that know no others."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is to be submitted."""

    name: str
    """Name of the run: lower-case letters, digits and hyphens, at most 48 characters."""
    nodes: int
    devices: int
    """Processes of each node, one per device."""
    train: tuple[str, ...]
    """Arguments of ``nxdt`` that train, without the program itself; they resume where a checkpoint exists."""
    compile: tuple[str, ...]
    """Arguments of ``nxdt`` that compile the graphs first; empty where nothing is compiled ahead."""
    needs_agent: bool
    """True if the engine's runtime reads variables of an agent that starts the processes of a node, as XLA's does."""
    checkpoints: str
    """Directory or address of the checkpoints."""
    config: Mapping[str, Any]
    """The resolved configuration, without secrets, for schedulers whose machines do not see ``config_path``."""
    config_path: Path | None
    """The file that the configuration was read from; None for a recipe."""
    directory: Path
    """Directory of the job's files and, below it, of the logs."""
    working_directory: Path
    """Directory in which the command was called; relative paths of the configuration start there."""
    command_line: str
    """The command that made the files, for a comment in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Files for a scheduler, and the command that gives them to it."""

    files: Mapping[str, str]
    """Text by name, below the directory of the job. The first is the one to read."""
    command: tuple[str, ...]
    """Submits them; called in the directory of the job."""
    notes: tuple[str, ...] = ()
    """Sentences to print, such as what still has to exist on the cluster."""


class Launcher:
    """The target of the kind, called as ``Target()``; its module imports nothing heavy.

    ``nxdt launch`` lists those that override :meth:`submission`, under the record's ``name``. The record's ``config``
    is the section of its options: keys of a cluster file and options of the command at once. Options that are called
    ``nodes``, ``devices_per_node``, ``instance_type`` and ``compile`` mean for each launcher what they mean for
    Slurm's: the command compares the first three with the run, and compiles the graphs first or not.
    """

    @classmethod
    def submits(cls) -> bool:
        """Return whether it submits jobs."""
        return cls.submission is not Launcher.submission

    def join(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return the place of this process; None where this launcher did not start it, which is the default.

        A plugin's launcher is asked where ``NXDT_LAUNCHER`` has its name; its job files should set that variable.

        Raises:
            NxdtError: the variables contradict each other, or some are missing.
        """
        return None

    def submission(self, job: Job, options: Any) -> Submission:
        """Return the files of a job and the command that submits it; nothing is written or started here.

        Args:
            job: name, nodes, devices and commands of the run.
            options: an instance of the record's ``config``; None where it has none.

        Raises:
            CannotSubmit: the launcher only joins; the default.
            NxdtError: the job does not fit the options.
        """
        raise CannotSubmit(launcher=type(self).__name__)
