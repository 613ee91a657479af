"""A lock of the operating system on one file, and the note inside that names the process that holds it.

``flock`` belongs to an open file, so the kernel gives it back when the last process that has the file open is gone.
Workers that a process forks inherit the open file and may outlive it by seconds: they close it at once.

Whether locks bind all machines that mount a file system is in ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); where
there is none, nothing is known.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, final

from nxdt_core.system.progress import process_stat
from nxdt_core.system.regular_files import open_regular

__all__ = [
    "FileLock",
    "Liveness",
    "LocksUnsupported",
    "Mount",
    "Owner",
    "decode_owner",
    "mount_of",
    "take_file_lock",
    "this_process",
]

MOUNTS = Path("/proc/self/mountinfo")

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


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


class LocksUnsupported(OSError):
    """A lock of this store would not bind every process that reaches the store; a lease is used instead."""


@final
class FileLock:
    """A lock that this process holds; see :class:`nxdt_core.protocols.store.StorageLock`."""

    __slots__ = ("__weakref__", "_descriptor", "_path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    def held(self) -> bool:
        """Return whether the path still leads to the locked file."""
        return self._descriptor is not None and _leads_to(self._path, self._descriptor)

    def release(self) -> None:
        """Release the lock. The file stays: to delete it would let two others lock two files of one name."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock.release()  # closes the child's copy; the parent's open file keeps the lock


os.register_at_fork(after_in_child=_leave_to_parent)


def take_file_lock(path: Path, note: bytes) -> FileLock | None:
    """Lock ``path``, made where it is missing, and write ``note`` into it; None where another holds it.

    Raises:
        LocksUnsupported: the file system has no locks, or none that other machines see.
        NotRegularFile: the path is a link, a pipe or a device; nothing is written then.
    """
    mount = mount_of(path.parent)
    if mount is not None and not mount.locks_are_shared:
        reason = f"{mount.filesystem} is mounted without locks that other machines see"
        raise LocksUnsupported(errno.ENOLCK, reason, str(path))
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            locked = _lock(descriptor, path)
            mine = locked and _leads_to(path, descriptor)  # it may be replaced between opening and locking
            if mine:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, note, 0)
        except BaseException:
            os.close(descriptor)
            raise
        if mine:
            return FileLock(path, descriptor)
        os.close(descriptor)
        if not locked:
            return None


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise LocksUnsupported(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    return True


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the table of mounts."""

    point: Path
    filesystem: str
    """Type of the file system: ``ext4``, ``nfs4``, ``lustre``."""
    options: frozenset[str]
    """Options of the mount and of the file system."""

    @property
    def locks_are_shared(self) -> bool:
        """Return whether every machine that can see the file sees a ``flock`` here.

        Lustre has them with the option ``flock`` alone (``localflock`` binds one client), NFS unless ``local_lock``
        keeps them on the client, CIFS unless ``nobrl`` does; a FUSE server need not even hear of them.
        """
        if self.filesystem == "lustre":
            return "flock" in self.options
        if self.filesystem in ("nfs", "nfs4"):
            return self.options.isdisjoint({"nolock", "local_lock=flock", "local_lock=all"})
        if self.filesystem in ("cifs", "smb3"):
            return "nobrl" not in self.options
        return self.filesystem.partition(".")[0] not in ("fuse", "fuseblk")


def mount_of(path: Path) -> Mount | None:
    """Return the mount that holds ``path``, which need not exist; None where the system does not report it."""
    try:
        lines = os.fsdecode(MOUNTS.read_bytes()).split("\n")  # splitlines cuts at form feeds, which paths may have
    except OSError:
        return None
    target = path.resolve()
    covering: list[Mount] = []
    for line in filter(None, lines):  # 36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/root rw,errors=continue
        left, _, right = line.partition(" - ")
        point, options = left.split(" ")[4:6]
        filesystem, _, more = right.split(" ")[:3]
        path = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point))
        if target.is_relative_to(path):
            both = frozenset([*options.split(","), *more.split(",")])
            covering.append(Mount(point=path, filesystem=filesystem, options=both))
    # Of several at one point, the last one covers the others.
    return max(reversed(covering), key=lambda mount: len(mount.point.parts), default=None)


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
            try:
                os.kill(other.pid, 0)
            except ProcessLookupError:
                return "gone"
            except PermissionError:
                pass  # another user's
            fields = process_stat(other.pid)
            if not fields:  # hidden from this user
                return "running"
            dead = fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)
            return "gone" if dead or fields[19] != other.started else "running"
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
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        machine = ""
    names, restarts = zip(*jobs, strict=True) if jobs else ((), ())
    fields = process_stat(pid)
    return Owner(
        run=run,
        host=socket.gethostname(),
        pid=pid,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        started=fields[19] if fields else "",
        job=names,
        restarts=restarts,
        token=secrets.token_hex(8),
    )
