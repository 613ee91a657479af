"""Stores by their addresses, and the operating system's errors as errors that say what to do. Torch-free."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nxdt_core.checkpoint.format.file_names import step_of
from nxdt_core.errors.checkpoints import CheckpointIsNoFile, StorageDenied, StorageError, StorageFull, StoragePathIsFile
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.paths import scheme_of
from nxdt_core.system.regular_files import NotRegularFile

_MEANINGS: Mapping[int | None, Callable[..., StorageError]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), StorageFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), StorageDenied),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), StoragePathIsFile),
}
"""Errors by the operating system's number; :class:`StorageError` for any other."""


def explained(error: OSError, where: str) -> StorageError:
    """Return the error for a user that ``error`` means, met at the path, key or URI ``where``."""
    reason = error.strerror or str(error) or type(error).__name__
    meaning = CheckpointIsNoFile if isinstance(error, NotRegularFile) else _MEANINGS.get(error.errno, StorageError)
    return meaning(where=where, reason=reason)


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


def open_storage(uri: str, kernel: Kernel | None = None, config: Any = None) -> CheckpointStore:
    """Return the store that ``uri`` names.

    Args:
        uri: a plain path, ``file:///absolute/path``, or ``scheme://…`` of an installed plugin.
        kernel: knows the plugins; None starts one with the default policy, without plugins for a file's address.
        config: the dataclass of ``checkpoint.storage``; None means the component's defaults.

    Raises:
        BadStorageUri: ``uri`` is malformed.
        UnknownScheme: no usable plugin serves its scheme; the error names the one to install where it is known.
    """
    scheme = scheme_of(uri)
    kernel = kernel or Kernel.start(path=() if scheme == "file" else None)
    component = kernel.registry.storage_for_scheme(scheme)
    config_class = component.load_config()
    if config is None and config_class is not None:
        config = config_class()
    return component.load_class(CheckpointStore)(uri, config)


def locate(uri: str, kernel: Kernel | None = None, config: Any = None) -> tuple[CheckpointStore, int | None]:
    """Return the store and step that an address of a person means: its root, or one of its step directories.

    ``runs/a/checkpoints`` gives None as the step, ``runs/a/checkpoints/step-00000100`` gives 100.
    """
    name = uri.rstrip("/").rpartition("/")[2]
    step = step_of(name)
    if step is None:
        return open_storage(uri, kernel, config), None
    root = uri.rstrip("/").removesuffix(name)
    return open_storage(root or ".", kernel, config), step


def check_writable(storage: CheckpointStore) -> None:
    """Write and delete a small object, so that a run learns at its start what would stop its first save.

    Raises:
        StorageError: it cannot be written.
    """
    key = f"probe-{secrets.token_hex(8)}"
    with explained_os_errors(storage.uri):
        with storage.open_write(key) as stream:
            stream.write(b"nxdt")
        storage.delete_many([key])
