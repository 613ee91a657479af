"""What a launcher tells a process about its place, in environment variables. No torch, and nothing is started here.

Two ways are known: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun, the
elastic agent and most others set; and Slurm's own, which ``srun`` sets for each task.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from nxdt_core.errors.ranks import BadLaunchVariable, LaunchEnvironmentIncomplete

__all__ = ["Place", "first_host", "place_from_environment", "read_port", "read_variable"]

_USUAL = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
_SLURM_PORTS = range(12000, 32000)
"""Where the port of a Slurm job lies: above the well-known ones, below those that Linux hands out by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    """Whether an agent serves the store, so that rank 0 must not."""
    launcher: str = ""
    """Who started this process, for messages; empty where no launcher did."""
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


def place_from_environment(environment: Mapping[str, str] | None = None) -> Place:
    """Read the place of this process; a world of one where nothing says otherwise.

    Raises:
        LaunchEnvironmentIncomplete: some variables of a launcher are set and others are missing.
        BadLaunchVariable: a variable holds something else than it should.
    """
    variables = os.environ if environment is None else environment
    host = socket.gethostname()
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _usual(variables, host)
    if "SLURM_PROCID" in variables and _slurm_tasks(variables) > 1:
        return _slurm(variables, host)
    return Place(host=host)


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


def _usual(variables: Mapping[str, str], host: str) -> Place:
    rank, world_size = read_variable(variables, "RANK"), read_variable(variables, "WORLD_SIZE", least=1)
    if rank >= world_size:
        raise BadLaunchVariable(name="RANK", value=str(rank), wanted=f"below WORLD_SIZE, {world_size}")
    if world_size == 1:
        return Place(host=host, launcher="The environment")
    _require(variables, _USUAL, reason="RANK and WORLD_SIZE are")
    agent = "TORCHELASTIC_RUN_ID" in variables
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=read_variable(variables, "LOCAL_RANK"),
        host=host,
        master_addr=variables["MASTER_ADDR"],
        master_port=read_port(variables, "MASTER_PORT"),
        store_is_hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        launcher="torchrun" if agent else "The environment",
        attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _slurm_tasks(variables: Mapping[str, str]) -> int:
    """Tasks of the step that ``srun`` started; the job may hold more of them."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    return read_variable(variables, name, least=1) if name in variables else 1


def _slurm(variables: Mapping[str, str], host: str) -> Place:
    _require(variables, _SLURM, reason="SLURM_PROCID and SLURM_NTASKS are")
    job, step = variables["SLURM_JOB_ID"], variables.get("SLURM_STEP_ID", "0")
    hosts = variables.get("SLURM_STEP_NODELIST") or variables["SLURM_JOB_NODELIST"]
    return Place(
        rank=read_variable(variables, "SLURM_PROCID"),
        world_size=_slurm_tasks(variables),
        local_rank=read_variable(variables, "SLURM_LOCALID"),
        host=host,
        master_addr=variables.get("MASTER_ADDR") or first_host(hosts),
        master_port=read_port(variables, "MASTER_PORT") if "MASTER_PORT" in variables else _slurm_port(job, step),
        launcher="Slurm",
    )


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's notation: ``node[08-11,14],login`` gives ``node08``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first.group() if first else hosts).strip()


def _slurm_port(job: str, step: str) -> int:
    """Return a port that all tasks of a step derive identically and that differs between jobs, which may share a
    host."""
    digits = int(job) * 31 + int(step) if job.isdecimal() and step.isdecimal() else sum(map(ord, job))
    return _SLURM_PORTS[digits % len(_SLURM_PORTS)]


def _require(variables: Mapping[str, str], names: tuple[str, ...], *, reason: str) -> None:
    missing = tuple(name for name in names if not variables.get(name))
    if missing:
        raise LaunchEnvironmentIncomplete(missing=missing, reason=reason)
