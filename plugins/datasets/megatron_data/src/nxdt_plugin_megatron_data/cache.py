"""Keeps indices in files that all processes of a node map: the first one builds, the others wait for it.

An index is a directory, made under another name and renamed when it is whole, so that whoever dies while building
leaves nothing that is taken for an index. The lock is the operating system's, which frees it with the process that
held it. Where the file system has no locks that other machines see, each node builds once.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from nxdt_core.builtins.file_lock import FileLock, take_file_lock
from nxdt_core.data.digest import digest
from nxdt_core.protocols.checkpoint_storage import LocksUnsupported
from nxdt_plugin_megatron_data.indices import Indices

__all__ = ["cached_indices"]

_LOOK_AGAIN_S = 0.1
_log = logging.getLogger("nxdt.data")


def cached_indices(directory: Path, name: str, build: Callable[[], Indices]) -> Indices:
    """The index ``name`` of ``directory``, built where it is missing or damaged.

    Where the directory cannot be written, the index stays in the memory of this process, and a warning says so.
    """
    place = directory / name
    found = _mapped(place)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory, name):
            found = _mapped(place)  # another process may have built it while this one waited
            if found is None:
                _store(place, build())
                found = _mapped(place)
    except OSError as error:
        reason = error.strerror or str(error)
        _log.warning("%s: cannot keep an index there (%s); each process builds its own", directory, reason)
    return build() if found is None else found


def _mapped(place: Path) -> Indices | None:
    """The index in ``place``; None where there is none, or a damaged one."""
    try:
        arrays = [np.load(place / f"{each.name}.npy", mmap_mode="r").view(np.ndarray) for each in fields(Indices)]
    except (OSError, ValueError, EOFError):
        return None
    indices = Indices(*arrays)
    return indices if len(indices.samples) == len(indices.shuffle) + 1 else None


def _store(place: Path, indices: Indices) -> None:
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
    try:
        for name, array in indices.named():
            with (part / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        part.chmod(0o755)  # mkdtemp lets nobody else in, and a cache is shared
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        try:
            part.rename(place)
        except OSError:
            if _mapped(place) is None:  # not even one of another node, which built the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _alone(directory: Path, name: str) -> Iterator[None]:
    """Wait until no other process builds ``name``."""
    path = directory / f"{name}.lock"
    note = f"process {os.getpid()} builds this index\n".encode()
    lock = _try_lock(path, note)
    while lock is None:
        time.sleep(_LOOK_AGAIN_S)
        lock = _try_lock(path, note)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits for it finds that its name leads nowhere
        lock.release()


def _try_lock(path: Path, note: bytes) -> FileLock | None:
    try:
        return take_file_lock(path, note)
    except LocksUnsupported:
        node = Path(tempfile.gettempdir()) / f"nxdt-index-{os.getuid()}-{digest(str(path))}.lock"
        return take_file_lock(node, note)
