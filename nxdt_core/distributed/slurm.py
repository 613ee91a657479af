"""The place that ``srun`` assigns to each task, in ``SLURM_…`` variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nxdt_core.distributed.variables import port_of, read_port, read_variable, require
from nxdt_core.errors.clusters import LaunchersDisagree
from nxdt_core.protocols.launcher import Place

__all__ = ["first_host", "is_slurm_node", "join_slurm"]

_NEEDED = ("SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")


def join_slurm(variables: Mapping[str, str], host: str) -> Place | None:
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
    hosts = variables.get("SLURM_STEP_NODELIST") or variables["SLURM_JOB_NODELIST"]
    place = Place(
        rank=read_variable(variables, "SLURM_PROCID"),
        world_size=_count(variables, "TASKS"),
        local_rank=read_variable(variables, "SLURM_LOCALID"),
        host=host,
        master_addr=variables.get("MASTER_ADDR") or first_host(hosts),
        master_port=read_port(variables, "MASTER_PORT") if "MASTER_PORT" in variables else _port(job, step),
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


def _port(job: str, step: str) -> int:
    """Return a port that differs between jobs, which may share a host."""
    return port_of(int(job) * 31 + int(step) if job.isdecimal() and step.isdecimal() else sum(map(ord, job)))
