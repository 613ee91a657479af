"""The place that a launcher assigns to a process, in environment variables. No torch, and nothing is started here.

Three sets of variables are supported. torchrun, the elastic agent and most other launchers set ``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. ``mpirun`` sets those of Open MPI, MVAPICH or PMI
(MPICH, Intel MPI), and ``srun`` sets ``SLURM_…`` for each task. :func:`find_place` also calls a plugin's launcher.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nxdt_core.errors.launch import LaunchersDisagree, NotStartedByLauncher
from nxdt_core.errors.ranks import BadLaunchVariable, LaunchEnvironmentIncomplete
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.plugin import BUILTIN
from nxdt_core.protocols.launcher import Launcher, RankEnvironment

__all__ = [
    "LAUNCHER_VARIABLE",
    "MPI_SIZES",
    "OWN_LAUNCHERS",
    "find_place",
    "first_host",
    "is_mpi_node",
    "is_slurm_node",
    "join_mpi",
    "join_slurm",
    "join_torchrun",
    "port_of",
    "read_port",
    "read_rank_environment",
    "read_variable",
    "require",
]

_PORTS = range(12000, 32000)
"""Range of derived ports: above the well-known ones, below those that Linux hands out by itself."""


_NEEDED = ("SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
_OMPI, _MV2 = "OMPI_COMM_WORLD", "MV2_COMM_WORLD"
_OMPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
LAUNCHER_VARIABLE = "NXDT_LAUNCHER"
"""Names the launcher whose variables are used if those of several launchers are set."""
_USUAL = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NODE = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_Join = Callable[[Mapping[str, str], str], RankEnvironment | None]


def read_variable(variables: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """Return an integer of at least ``least``.

    Raises:
        BadLaunchVariable: it is none.
    """
    text = variables[name]
    if not text.isdecimal() or int(text) < least:
        raise BadLaunchVariable(name=name, value=text, wanted=f"a whole number of {least} or more")
    return int(text)


def read_port(variables: Mapping[str, str], name: str) -> int:
    """Return the TCP port that the environment variable ``name`` holds.

    Raises:
        BadLaunchVariable: it is none.
    """
    port = read_variable(variables, name, least=1)
    if port > 65535:
        raise BadLaunchVariable(name=name, value=str(port), wanted="a port: a number from 1 to 65535")
    return port


def require(variables: Mapping[str, str], names: tuple[str, ...], *, reason: str) -> None:
    """Check that all of ``names`` are set and not empty.

    Args:
        variables: environment variables by name.
        names: variables that are needed.
        reason: which variables of the launcher are set, for the message: ``RANK and WORLD_SIZE are``.

    Raises:
        LaunchEnvironmentIncomplete: some are missing.
    """
    missing = tuple(name for name in names if not variables.get(name))
    if missing:
        raise LaunchEnvironmentIncomplete(missing=missing, reason=reason)


def port_of(number: int) -> int:
    """Return a port that all processes derive identically from the number of their job."""
    return _PORTS[number % len(_PORTS)]


def join_slurm(variables: Mapping[str, str], host: str) -> RankEnvironment | None:
    """Return the place of a task that ``srun`` started with others; None for any other process.

    The script of a batch job is another one: it has the variables of a task, and none of a step.

    Raises:
        LaunchEnvironmentIncomplete: some variables are missing.
        BadLaunchVariable: a variable holds something else than it should.
        LaunchersDisagree: a number of the task is not below the number of tasks.
    """
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables or _count(variables, "TASKS") <= 1:
        return None
    require(variables, _NEEDED, reason="SLURM_PROCID and SLURM_NTASKS are")
    job, step = variables["SLURM_JOB_ID"], variables["SLURM_STEP_ID"]
    # A port that differs between jobs, which may share a host.
    numbered = job.isdecimal() and step.isdecimal()
    port = port_of(int(job) * 31 + int(step) if numbered else sum(map(ord, job)))
    hosts = variables.get("SLURM_STEP_NODELIST") or variables["SLURM_JOB_NODELIST"]
    place = RankEnvironment(
        rank=read_variable(variables, "SLURM_PROCID"),
        world_size=_count(variables, "TASKS"),
        local_rank=read_variable(variables, "SLURM_LOCALID"),
        host=host,
        master_addr=variables.get("MASTER_ADDR") or first_host(hosts),
        master_port=read_port(variables, "MASTER_PORT") if "MASTER_PORT" in variables else port,
        launcher="Slurm",
    )
    for name, number in (("SLURM_PROCID", place.rank), ("SLURM_LOCALID", place.local_rank)):
        if number >= place.world_size:
            contradiction = f"{name} is {number} in a step of {place.world_size} tasks"
            raise LaunchersDisagree(contradiction=contradiction, launcher="local")
    return place


def is_slurm_node(variables: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started one task on each node, so that a task may be a node of the run."""
    return "SLURM_PROCID" in variables and _count(variables, "TASKS") == _count(variables, "NODES")


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's notation: ``node[08-11,14],login`` gives ``node08``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first.group() if first else hosts).strip()


def _count(variables: Mapping[str, str], what: str) -> int:
    """Tasks or nodes of the step that ``srun`` started; the job may hold more of them."""
    names = (f"SLURM_STEP_NUM_{what}", "SLURM_NTASKS" if what == "TASKS" else "SLURM_NNODES")
    return next((read_variable(variables, name, least=1) for name in names if name in variables), 1)


class _Names(NamedTuple):
    """Variables of one implementation of MPI."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    jobs: tuple[str, ...]
    """Variables whose values differ between two runs of ``mpirun``."""


_IMPLEMENTATIONS = (
    _Names(f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE", _OMPI_JOBS),
    _Names(f"{_MV2}_RANK", f"{_MV2}_SIZE", f"{_MV2}_LOCAL_RANK", f"{_MV2}_LOCAL_SIZE", ("MPIRUN_ID", "PMI_ID")),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID", "HYDI_CONTROL_FD")),
)

MPI_SIZES = tuple(names.size for names in _IMPLEMENTATIONS)
"""Variables with the number of processes; every ``mpirun`` sets one of them."""


def join_mpi(variables: Mapping[str, str], host: str) -> RankEnvironment | None:
    """Return the place of a process that ``mpirun`` started with others; None for any other process.

    The host of rank 0 is ``MASTER_ADDR``, this host where all processes run on it, or the first host of a Slurm job.

    Raises:
        LaunchEnvironmentIncomplete: some variables are missing.
        BadLaunchVariable: a variable holds something else than it should.
        LaunchersDisagree: a number of the process is not below the number of processes.
    """
    names = _used(variables)
    if names is None or read_variable(variables, names.size, least=1) == 1:
        return None
    require(variables, (names.rank, names.local_rank), reason=f"{names.size} is")
    rank, size = read_variable(variables, names.rank), read_variable(variables, names.size, least=1)
    local_rank, local_size = read_variable(variables, names.local_rank), _local_size(variables, names)
    for name, number, limit in ((names.rank, rank, size), (names.local_rank, local_rank, local_size or size)):
        if number >= limit:
            contradiction = f"{name} is {number} among {limit} processes"
            raise LaunchersDisagree(contradiction=contradiction, launcher="local")
    address, reason = variables.get("MASTER_ADDR", ""), f"{names.rank} and {names.size} are"
    if not address and local_size == size:
        address = "127.0.0.1"
    elif not address and "SLURM_JOB_NODELIST" in variables:
        address = first_host(variables["SLURM_JOB_NODELIST"])
    elif not address:
        require(variables, ("MASTER_ADDR",), reason=reason)
    job = next((variables[name] for name in names.jobs if variables.get(name)), "")
    if "MASTER_PORT" not in variables and not job:
        require(variables, ("MASTER_PORT",), reason=reason)
    port = read_port(variables, "MASTER_PORT") if "MASTER_PORT" in variables else port_of(zlib.crc32(job.encode()))
    return RankEnvironment(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        host=host,
        master_addr=address,
        master_port=port,
        launcher="MPI",
    )


def is_mpi_node(variables: Mapping[str, str]) -> bool:
    """Return whether ``mpirun`` started one process on each node, so that it may be a node of the run."""
    names = _used(variables)
    return names is not None and _local_size(variables, names) == 1


def _used(variables: Mapping[str, str]) -> _Names | None:
    return next((names for names in _IMPLEMENTATIONS if names.size in variables), None)


def _local_size(variables: Mapping[str, str], names: _Names) -> int:
    """Return the processes of this host; 0 where that is not known."""
    return read_variable(variables, names.local_size, least=1) if names.local_size in variables else 0


def read_rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment:
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
        return place or RankEnvironment(host=host)
    if not any(name in variables for names in _ALWAYS.values() for name in names):
        return RankEnvironment(host=host)
    place = join_torchrun(variables, host)
    if place is not None:
        # No launcher of as many processes gives this one another rank. An elastic agent numbers the nodes itself, so
        # that its ranks may differ from those of the launcher around it.
        alone = place.world_size == 1 or _has_agent(variables)
        for name, join in () if alone else (("mpi", join_mpi), ("slurm", join_slurm)):
            other = join(variables, host)
            if other is not None and other.world_size == place.world_size and other.rank != place.rank:
                ranks = f"RANK is {place.rank} of {place.world_size}, and {other.launcher} says rank {other.rank}"
                raise LaunchersDisagree(contradiction=ranks, launcher=name)
        return place
    numbered = all(variables.get(name) for name in _NODE)
    if numbered and (is_slurm_node(variables) or is_mpi_node(variables)):  # for nxdt to start those of the devices
        return RankEnvironment(host=host)
    return join_mpi(variables, host) or join_slurm(variables, host) or RankEnvironment(host=host)


def join_torchrun(variables: Mapping[str, str], host: str) -> RankEnvironment | None:
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
        return RankEnvironment(host=host, launcher="The environment")
    require(variables, _USUAL, reason="RANK and WORLD_SIZE are")
    local_rank = read_variable(variables, "LOCAL_RANK")
    if local_rank >= world_size:
        raise BadLaunchVariable(name="LOCAL_RANK", value=str(local_rank), wanted=f"below WORLD_SIZE, {world_size}")
    return RankEnvironment(
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


_JOINS: Mapping[str, _Join] = {
    "environment": join_torchrun,
    "torchrun": join_torchrun,
    "mpi": join_mpi,
    "slurm": join_slurm,
    "local": lambda variables, host: RankEnvironment(host=host),
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
    """Return whether an elastic agent started this process: torchrun's, or that of ``nxdt train``."""
    return "TORCHELASTIC_RUN_ID" in variables and "RANK" in variables


def find_place() -> RankEnvironment:
    """Return the place of this process, and set the usual variables where a plugin's launcher has said it.

    A plugin's launcher is called only if ``NXDT_LAUNCHER`` names it. By naming it, the operator permits the import of
    the plugin before any configuration with ``plugins.allow`` has been read.

    Raises:
        UnknownComponent: ``NXDT_LAUNCHER`` names a launcher that no plugin offers.
        NotStartedByLauncher: it names one that did not start this process.
        NxdtError: variables are missing or contradict each other.
    """
    name = os.environ.get(LAUNCHER_VARIABLE, "")
    if not name or name in OWN_LAUNCHERS or "TORCHELASTIC_RUN_ID" in os.environ:
        return read_rank_environment()
    launcher = Kernel.start().registry.get("launcher", name)
    if launcher.plugin == BUILTIN:
        return read_rank_environment()
    place = launcher.load_class(Launcher)().join(os.environ)
    if place is None:
        raise NotStartedByLauncher(launcher=name)
    if place.world_size > 1:
        place.export()
    return place
