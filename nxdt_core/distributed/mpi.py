"""The place that ``mpirun`` assigns to each process: variables of Open MPI, MVAPICH, and of PMI (MPICH, Intel MPI)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from nxdt_core.distributed.slurm import first_host
from nxdt_core.distributed.variables import port_of, read_port, read_variable, require
from nxdt_core.errors.clusters import LaunchersDisagree
from nxdt_core.protocols.launcher import Place

__all__ = ["MPI_SIZES", "is_mpi_node", "join_mpi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Variables of one implementation of MPI."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    jobs: tuple[str, ...]
    """Variables whose values differ between two runs of ``mpirun``."""


_IMPLEMENTATIONS = (
    _Names(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Names(
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        jobs=("MPIRUN_ID", "PMI_ID"),
    ),
    _Names(
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        jobs=("PMI_JOBID", "HYDI_CONTROL_FD"),
    ),
)

MPI_SIZES = tuple(names.size for names in _IMPLEMENTATIONS)
"""Variables with the number of processes; every ``mpirun`` sets one of them."""


def join_mpi(variables: Mapping[str, str], host: str) -> Place | None:
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
    return Place(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        host=host,
        master_addr=_address(variables, names, alone=local_size == size),
        master_port=_port(variables, names),
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


def _address(variables: Mapping[str, str], names: _Names, *, alone: bool) -> str:
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"]
    if alone:
        return "127.0.0.1"
    if "SLURM_JOB_NODELIST" in variables:
        return first_host(variables["SLURM_JOB_NODELIST"])
    require(variables, ("MASTER_ADDR",), reason=f"{names.rank} and {names.size} are")
    return ""


def _port(variables: Mapping[str, str], names: _Names) -> int:
    if "MASTER_PORT" in variables:
        return read_port(variables, "MASTER_PORT")
    job = next((variables[name] for name in names.jobs if variables.get(name)), "")
    if not job:
        require(variables, ("MASTER_PORT",), reason=f"{names.rank} and {names.size} are")
    return port_of(zlib.crc32(job.encode()))
