"""From the operating system's errors to errors that say what to do. Torch-free, used by stores and by saves."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from nxdt_core.errors.checkpoints import CheckpointIsNoFile, StorageDenied, StorageError, StorageFull, StoragePathIsFile
from nxdt_core.regular_files import NotRegularFile

__all__ = ["explained", "explained_os_errors", "reason_of"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_IN_THE_WAY = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EISDIR})


def explained(error: OSError, where: str) -> StorageError:
    """Return the error for a user that ``error`` means, met at the path, key or URI ``where``."""
    reason = error.strerror or str(error) or type(error).__name__
    if isinstance(error, NotRegularFile):
        return CheckpointIsNoFile(where=where, reason=reason)
    if error.errno in _FULL:
        return StorageFull(where=where, reason=reason)
    if error.errno in _DENIED:
        return StorageDenied(where=where, reason=reason)
    if error.errno in _IN_THE_WAY:
        return StoragePathIsFile(where=where, reason=reason)
    return StorageError(where=where, reason=reason)


@contextmanager
def explained_os_errors(where: str) -> Iterator[None]:
    """Raise :func:`explained` in the place of any ``OSError`` of the block, ``FileNotFoundError`` included."""
    try:
        yield
    except OSError as error:
        raise explained(error, where) from error


def reason_of(error: OSError | StorageError) -> str:
    """Return what a store failed with, without the advice, for a warning about something that is tried again."""
    return error.what() if isinstance(error, StorageError) else str(error)
