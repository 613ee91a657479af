"""Opening files in directories that others can write to, or that came from somewhere else.

A name in such a directory may be a symbolic link to a file of this user, a named pipe that blocks the process that
opens it, or a device. Everything that nxdt opens there is a regular file, and a link is followed only where the caller
says so.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["NotRegularFile", "kind_of", "open_regular", "private_directory", "regular_opener", "require_regular"]

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class NotRegularFile(OSError):
    """A name belongs to something other than a regular file; ``strerror`` says what it is."""


def kind_of(mode: int) -> str:
    """Return the kind of file of an ``os.stat`` mode, such as ``a symbolic link``; empty for a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "" if stat.S_ISREG(mode) else "a special file")


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor; never blocks on a pipe or a device.

    Args:
        path: the file. Symbolic links among its parent directories are followed as usual.
        flags: flags for ``os.open``; ``O_TRUNC`` empties the file once it is known to be a regular one.
        mode: mode of a file that ``O_CREAT`` creates.
        follow: whether ``path`` itself may be a symbolic link.

    Raises:
        NotRegularFile: a link, pipe, device, socket or, for writing, a file with further names (hard links).
        OSError: as for ``os.open``; a directory is an ``IsADirectoryError``.
    """
    blocking = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | blocking | (0 if follow else os.O_NOFOLLOW), mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link; a pipe or socket that no process reads
            require_regular(path, follow=follow)
        raise
    try:
        _check(path, os.fstat(descriptor), writable=bool(flags & (os.O_WRONLY | os.O_RDWR)))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def regular_opener(path: str, flags: int) -> int:
    """Open a regular file with :func:`open_regular`: the ``opener`` of Python's ``open``. Links are not followed."""
    return open_regular(Path(path), flags)


def require_regular(path: Path, *, follow: bool = False) -> os.stat_result:
    """Return the status of a regular file, for libraries that can only open files by their paths.

    Raises:
        NotRegularFile: it is something else.
        IsADirectoryError: it is a directory.
    """
    found = path.stat() if follow else path.lstat()
    _check(path, found, writable=False)
    return found


def private_directory(path: Path) -> Path:
    """Return ``path`` as a directory of this user that no other user can enter; it is made where it is missing.

    Raises:
        NotRegularFile: it is not a directory, or it belongs to another user or is open to others.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotRegularFile(errno.ENOTDIR, f"it is {kind_of(found.st_mode) or 'a file'}, not a directory", str(path))
    if found.st_uid != os.geteuid():
        raise NotRegularFile(errno.EPERM, "it belongs to another user", str(path))
    if found.st_mode & 0o077:
        raise NotRegularFile(errno.EPERM, "other users can enter it; its mode must be 0700", str(path))
    return path


def _check(path: Path, found: os.stat_result, *, writable: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = kind_of(found.st_mode)
    if kind:
        raise NotRegularFile(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if writable and found.st_nlink > 1:
        raise NotRegularFile(errno.EMLINK, "the file has another name too (a hard link)", str(path))
