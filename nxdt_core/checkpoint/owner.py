"""The owner of a store: a process on a machine, within a job; and whether that process is gone. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

Liveness = Literal["running", "gone", "unknown"]

_PROC = Path("/proc")
_EXITING = 0x4
"""PF_EXITING of the kernel's ``task_struct.flags``: the process frees its memory, and then its locks."""

_JOBS = (
    ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("batch", "AWS_BATCH_JOB_ID", "AWS_BATCH_JOB_ATTEMPT"),
    ("elastic", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""Schedulers that count how often a job restarts under its number. (Slurm sets the count from the first restart on.)"""
_NO_JOBS = frozenset({"", "none", "nxdt"})
"""Run ids that torchrun and ``nxdt train`` fill in themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One process that saves, as recorded for other processes."""

    run: str
    """Name of the run, for people."""
    host: str
    pid: int
    since: str
    """UTC, ISO 8601."""
    machine: str = ""
    """Boot and process namespace within which ``pid`` is valid; empty where the system does not report them."""
    started: str = ""
    """Start of the process in the system's ticks: a later process may get the same ``pid``."""
    job: tuple[str, ...] = ()
    """Scheduler jobs in which it runs, each ``name=number``."""
    restarts: tuple[int, ...] = ()
    """Restarts by each of these schedulers."""
    token: str
    """Differs between any two owners."""

    def __str__(self) -> str:
        return f"{self.run!r} (process {self.pid} on {self.host}, since {self.since})"

    def encode(self) -> bytes:
        """Return the JSON that is stored."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def liveness_of(self, other: Owner) -> Liveness:
        """Return the fate of another process, as far as this one, which must be alive, knows it without waiting."""
        if self.machine and self.machine == other.machine:
            return "running" if _runs(other.pid, other.started) else "gone"
        # A scheduler ends every process of a job before it starts the job again. The job number alone is
        # not enough: two steps of one job may run at the same time.
        restarted = bool(self.job) and self.job == other.job and self.restarts > other.restarts
        return "gone" if restarted else "unknown"


def decode_owner(data: bytes) -> Owner | None:
    """Return the inverse of :meth:`Owner.encode`; None for anything else, such as a note that is being written."""
    try:
        table = json.loads(data)
        table |= {name: tuple(table[name]) for name in ("job", "restarts")}
        return Owner(**table)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def this_process(run: str, environment: Mapping[str, str] | None = None) -> Owner:
    """Return this process as an owner.

    Args:
        run: what people call it.
        environment: None reads ``os.environ``.
    """
    variables = os.environ if environment is None else environment
    pid = os.getpid()
    jobs = [
        (f"{name}={variables[job]}", int(variables.get(count) or 0))
        for name, job, count in _JOBS
        if variables.get(job, "") not in _NO_JOBS and (variables.get(count) or "0").isdecimal()
    ]
    fields = _stat(pid)
    return Owner(
        run=run,
        host=socket.gethostname(),
        pid=pid,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        started="" if fields is None else fields.started,
        job=tuple(job for job, _ in jobs),
        restarts=tuple(count for _, count in jobs),
        token=secrets.token_hex(8),
    )


def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Stat:
    """State of a process from proc_pid_stat(5)."""

    state: str
    flags: int
    started: str


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name, in parentheses, may hold anything
    return _Stat(state=fields[0], flags=int(fields[6]), started=fields[19])


def _runs(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    process = _stat(pid)
    if process is None:  # hidden from this user
        return True
    return process.started == started and process.state not in "ZX" and not process.flags & _EXITING
