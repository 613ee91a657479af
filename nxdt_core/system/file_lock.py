"""One lock of the operating system on one file, with a note inside of who has it.

``flock`` belongs to an open file, so the kernel gives it back when the last process that has the file open is gone.
Workers that a process forks inherit the open file and may outlive it by seconds: they close it at once.

Whether locks bind all machines that mount a file system is in ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)); where
there is none, nothing is known.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import final

from nxdt_core.system.regular_files import open_regular

__all__ = ["FileLock", "LocksUnsupported", "Mount", "mount_of", "take_file_lock"]

MOUNTS = Path("/proc/self/mountinfo")

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


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
    # Of several at one point, the last one covers the others.
    covering = [mount for mount in map(_parse, filter(None, lines)) if target.is_relative_to(mount.point)]
    return max(reversed(covering), key=lambda mount: len(mount.point.parts), default=None)


def _parse(line: str) -> Mount:
    """Parse a line such as ``36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/root rw,errors=continue``."""
    left, _, right = line.partition(" - ")
    point, options = left.split(" ")[4:6]
    filesystem, _, more = right.split(" ")[:3]
    return Mount(
        point=Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)),
        filesystem=filesystem,
        options=frozenset([*options.split(","), *more.split(",")]),
    )
