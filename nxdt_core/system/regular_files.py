"""Reading and writing files in directories that others can write to, or that came from somewhere else.

A name in such a directory may be a symbolic link to a file of this user, a named pipe that blocks the process that
opens it, or a device. Everything that nxdt opens there is a regular file, and a link is followed only where the caller
says so. What is written whole gets a new file, which then takes the name.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "NotRegularFile",
    "copy_file",
    "kind_of",
    "make_directory",
    "open_regular",
    "private_directory",
    "read_text",
    "regular_opener",
    "replace_text",
    "replacing",
    "require_fetched",
    "require_inside",
    "require_plain_files",
    "require_regular",
]

_LONGEST_TEXT_BYTES = 64 << 20
"""Largest size of a file that is read whole: a configuration or a state of a run has a thousandth of it."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small text that replaces a file where a repository was cloned without Git LFS."""

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


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor; never blocks on a pipe or a device.

    Args:
        path: the file. Symbolic links among its parent directories are followed as usual.
        flags: flags for ``os.open``; ``O_TRUNC`` empties the file once it is known to be a regular one.
        follow: whether ``path`` itself may be a symbolic link.

    Raises:
        NotRegularFile: a link, pipe, device, socket or, for writing, a file with further names (hard links).
        OSError: as for ``os.open``; a directory is an ``IsADirectoryError``.
    """
    blocking = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | blocking | (0 if follow else os.O_NOFOLLOW), 0o666)
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
    status = path.stat() if follow else path.lstat()
    _check(path, status, writable=False)
    return status


def read_text(path: Path, *, follow: bool = False, errors: str = "strict") -> str:
    """Return the text of a regular file of UTF-8; ``path`` may be a link where ``follow`` is true.

    Raises:
        NotRegularFile: as for :func:`open_regular`.
        OSError: as for :func:`open_regular` and :func:`require_fetched`, and for a file of more than 64 MiB.
        UnicodeDecodeError: it is not UTF-8, and ``errors`` is ``strict``.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        content = file.read(_LONGEST_TEXT_BYTES + 1)
    if len(content) > _LONGEST_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_LONGEST_TEXT_BYTES >> 20} MiB", str(path))
    _check_fetched(path, content)
    return content.decode("utf-8", errors)


def require_fetched(path: Path) -> None:
    """Check that a regular file is not a Git LFS pointer, which readers would take for a damaged file, or for text.

    Raises:
        OSError: it is one, or as for :func:`open_regular`; ``strerror`` says so. Links are followed.
    """
    with open(open_regular(path, follow=True), "rb") as file:
        _check_fetched(path, file.read(len(_LFS_POINTER)))


def require_inside(path: Path, directory: Path) -> None:
    """Check that links at ``path`` lead to a file of ``directory``, or to a blob of the same cache of the Hugging Face
    hub (``models--owner--name/snapshots/REVISION/file`` to ``models--owner--name/blobs``).

    Raises:
        NotRegularFile: they lead elsewhere, where a directory from someone else would name files of this user.
    """
    root, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    blobs = None if snapshots is None or "--" not in snapshots.parent.name else snapshots.with_name("blobs")
    if not target.is_relative_to(root) and target.parent != blobs:
        reason = f"it is a link out of its directory, to '{target}'; copy that file there if you want it"
        raise NotRegularFile(errno.EXDEV, reason, str(path))


def _check_fetched(path: Path, content: bytes) -> None:
    if content.startswith(_LFS_POINTER):
        raise OSError(errno.EINVAL, "it is a Git LFS pointer, and 'git lfs pull' fetches the file", str(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of ``path`` when the block ends; where it fails, ``path`` is unchanged.

    A link or a pipe of that name is replaced, and not opened. A file keeps its permissions. A process that is killed in
    the block leaves a hidden ``.nxdt-….part``.

    Raises:
        OSError: the file cannot be written, or ``path`` is a directory.
    """
    part = path.with_name(f".nxdt-{secrets.token_hex(6)}.part")
    try:
        with open(open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            with suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode):
                    os.fchmod(file.fileno(), mode & 0o777)
            yield file
        part.replace(path)
    except OSError as error:
        if error.filename == str(part):  # a name that no user has seen
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``path`` whole, or leave it as it was: a full disk must not empty what was there before."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file, its permissions and its times; ``source`` may be a link, and ``target`` is replaced whole.

    Raises:
        OSError: as for :func:`open_regular` and :func:`replacing`.
    """
    with open(open_regular(source, follow=True), "rb") as read, replacing(target) as written:
        shutil.copyfileobj(read, written)
        written.flush()
        status = os.fstat(read.fileno())
        os.fchmod(written.fileno(), status.st_mode & 0o777)
        os.utime(written.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def make_directory(path: Path) -> Path:
    """Return ``path`` as a directory, made with its parents where it is missing; it is not a link to one.

    Raises:
        NotRegularFile: it is a symbolic link, or something else.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    _require_directory(path)
    return path


def require_plain_files(directory: Path) -> None:
    """Make a directory, or check that every file in it could be written, for libraries that open them by their paths.

    Raises:
        NotRegularFile: as for :func:`make_directory` and :func:`open_regular`.
    """
    for path in make_directory(directory).iterdir():
        if not path.is_dir() or path.is_symlink():
            os.close(open_regular(path, os.O_WRONLY))


def private_directory(path: Path) -> Path:
    """Return ``path`` as a directory of this user that no other user can enter; it is made where it is missing.

    Raises:
        NotRegularFile: it is not a directory, or it belongs to another user or is open to others.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    status = _require_directory(path)
    if status.st_uid != os.geteuid():
        raise NotRegularFile(errno.EPERM, "it belongs to another user", str(path))
    if status.st_mode & 0o077:
        raise NotRegularFile(errno.EPERM, "other users can enter it; its mode must be 0700", str(path))
    return path


def _require_directory(path: Path) -> os.stat_result:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotRegularFile(errno.ENOTDIR, f"it is {kind_of(status.st_mode) or 'a file'}, not a directory", str(path))
    return status


def _check(path: Path, status: os.stat_result, *, writable: bool) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = kind_of(status.st_mode)
    if kind:
        raise NotRegularFile(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if writable and status.st_nlink > 1:
        raise NotRegularFile(errno.EMLINK, "the file has another name too (a hard link)", str(path))
