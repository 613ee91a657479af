"""The place that a launcher assigns to a process, in environment variables. No torch, and nothing is started here.

Three sets of variables are supported. torchrun, the elastic agent and most other launchers set ``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. ``mpirun`` sets those of MPI
(:mod:`nxdt_core.distributed.mpi`), and ``srun`` sets its own for each task (:mod:`nxdt_core.distributed.slurm`).
:mod:`nxdt_core.launch.joining` calls launchers of plugins.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from nxdt_core.distributed.mpi import MPI_SIZES, is_mpi_node, join_mpi
from nxdt_core.distributed.slurm import is_slurm_node, join_slurm
from nxdt_core.distributed.variables import read_port, read_variable, require
from nxdt_core.errors.clusters import LaunchersDisagree, NotStartedByLauncher
from nxdt_core.errors.ranks import BadLaunchVariable
from nxdt_core.protocols.launcher import Place

__all__ = ["LAUNCHER_VARIABLE", "OWN_LAUNCHERS", "join_usual", "place_from_environment"]

LAUNCHER_VARIABLE = "NXDT_LAUNCHER"
"""Names the launcher whose variables are used if those of several launchers are set."""

_USUAL = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NODE = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_Join = Callable[[Mapping[str, str], str], Place | None]


def place_from_environment(environment: Mapping[str, str] | None = None) -> Place:
    """Read the place of this process; without any variables it is alone in a world of one process.

    The usual variables come first, then MPI's (whose ``mpirun`` may itself be started by ``srun``), then Slurm's.
    ``NXDT_LAUNCHER`` names one of them.

    Raises:
        LaunchEnvironmentIncomplete: some variables of a launcher are set and others are missing.
        BadLaunchVariable: a variable holds something else than it should.
        LaunchersDisagree: variables contradict each other.
        NotStartedByLauncher: ``NXDT_LAUNCHER`` names a launcher that did not start this process.
    """
    variables = os.environ if environment is None else environment
    host = socket.gethostname()
    named = variables.get(LAUNCHER_VARIABLE, "")
    if named in _JOINS and not _has_agent(variables):
        place = _JOINS[named](variables, host)
        if place is None and not any(name in variables for name in _ALWAYS[named]):
            raise NotStartedByLauncher(launcher=named)
        return place or Place(host=host)
    place = join_usual(variables, host)
    if place is not None:
        _compare(place, variables, host)
        return place
    if _is_node(variables):
        return Place(host=host)
    return join_mpi(variables, host) or join_slurm(variables, host) or Place(host=host)


def join_usual(variables: Mapping[str, str], host: str) -> Place | None:
    """Return the place that ``RANK`` and ``WORLD_SIZE`` say; None where they are not set.

    Raises:
        LaunchEnvironmentIncomplete: some of the other variables are missing.
        BadLaunchVariable: a variable holds something else than it should.
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank, world_size = read_variable(variables, "RANK"), read_variable(variables, "WORLD_SIZE", least=1)
    if rank >= world_size:
        raise BadLaunchVariable(name="RANK", value=str(rank), wanted=f"below WORLD_SIZE, {world_size}")
    if world_size == 1:
        return Place(host=host, launcher="The environment")
    require(variables, _USUAL, reason="RANK and WORLD_SIZE are")
    local_rank = read_variable(variables, "LOCAL_RANK")
    if local_rank >= world_size:
        raise BadLaunchVariable(name="LOCAL_RANK", value=str(local_rank), wanted=f"below WORLD_SIZE, {world_size}")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=host,
        master_addr=variables["MASTER_ADDR"],
        master_port=read_port(variables, "MASTER_PORT"),
        store_is_hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        launcher="torchrun" if _has_agent(variables) else "The environment",
        attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _alone(variables: Mapping[str, str], host: str) -> Place:
    return Place(host=host)


_JOINS: Mapping[str, _Join] = {
    "environment": join_usual,
    "torchrun": join_usual,
    "mpi": join_mpi,
    "slurm": join_slurm,
    "local": _alone,
}
_ALWAYS: Mapping[str, tuple[str, ...]] = {
    "environment": ("RANK",),
    "torchrun": ("RANK",),
    "mpi": MPI_SIZES,
    "slurm": ("SLURM_PROCID",),
    "local": (),
}
"""Variables by launcher: it sets at least one of them, even for a single process."""
OWN_LAUNCHERS = frozenset(_JOINS)
"""Names of launchers that are read here, without plugins."""


def _has_agent(variables: Mapping[str, str]) -> bool:
    """Whether an elastic agent started this process: torchrun's, or that of ``nxdt train``."""
    return "TORCHELASTIC_RUN_ID" in variables and "RANK" in variables


def _is_node(variables: Mapping[str, str]) -> bool:
    """Whether a launcher started one process on each node, for nxdt to start those of the devices."""
    numbered = all(variables.get(name) for name in _NODE)
    return numbered and (is_slurm_node(variables) or is_mpi_node(variables))


def _compare(place: Place, variables: Mapping[str, str], host: str) -> None:
    """Check that a launcher of as many processes does not give this one another rank.

    An elastic agent numbers the nodes itself, so that its ranks may differ from those of the launcher around it.
    """
    if place.world_size == 1 or _has_agent(variables):
        return
    for name, join in (("mpi", join_mpi), ("slurm", join_slurm)):
        other = join(variables, host)
        if other is not None and other.world_size == place.world_size and other.rank != place.rank:
            said = f"RANK is {place.rank} of {place.world_size}, and {other.launcher} says rank {other.rank}"
            raise LaunchersDisagree(contradiction=said, launcher=name)
