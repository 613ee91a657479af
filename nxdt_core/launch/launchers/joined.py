"""Launchers that submit nothing and only give processes their rank: torchrun, others with its variables, and MPI."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from nxdt_core.distributed.environment import join_usual
from nxdt_core.distributed.mpi import join_mpi
from nxdt_core.errors.clusters import CannotSubmit
from nxdt_core.protocols.launcher import Job, Place, Submission

__all__ = ["EnvironmentLauncher", "MPILauncher"]


class EnvironmentLauncher:
    """``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``."""

    def join(self, environment: Mapping[str, str]) -> Place | None:
        """Return the place that the usual variables say."""
        return join_usual(environment, socket.gethostname())

    def submission(self, job: Job, options: Any) -> Submission:
        """Raise CannotSubmit: torchrun is started by hand or by a scheduler."""
        raise CannotSubmit(launcher="environment")


class MPILauncher:
    """Variables of ``mpirun``."""

    def join(self, environment: Mapping[str, str]) -> Place | None:
        """Return the place that MPI's variables say."""
        return join_mpi(environment, socket.gethostname())

    def submission(self, job: Job, options: Any) -> Submission:
        """Raise CannotSubmit: ``mpirun`` is called by hand or in a job of a scheduler."""
        raise CannotSubmit(launcher="mpi")
