"""Tokens of a text column: in memory, or in a directory that later runs and other processes of the machine share.

Two files a dataset, named by a digest of all that decides them. The second is written when the first is complete, so
that an aborted run leaves nothing that counts; a lock lets one process tokenise while the others wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from nxdt_core.builtins.file_lock import take_file_lock
from nxdt_core.data.tokens import TokenStream
from nxdt_core.protocols.checkpoint_storage import LocksUnsupported
from nxdt_plugin_hf_data.errors import CacheUnwritable

__all__ = ["cached"]

_POLL_S = 0.2


def cached(directory: Path | None, name: str, make: Callable[[], TokenStream]) -> TokenStream:
    """What ``make`` returns, or what it returned when it was called for the same ``name``.

    Raises:
        CacheUnwritable: the directory cannot be written to, or is full.
    """
    if directory is None:
        return make()
    tokens, starts = directory / f"{name}.tokens.npy", directory / f"{name}.starts.npy"
    with ExitStack() as held:
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _wait_or_lock(starts, held)
        if not starts.is_file():
            made = make()
            with _writing(directory):
                _write(tokens, made.tokens[:])
                _write(starts, made.starts)
    return TokenStream(tokens=np.load(tokens, mmap_mode="r"), starts=np.load(starts))


def _wait_or_lock(done: Path, held: ExitStack) -> None:
    """Return when the file is there, or when it is this process's turn to make it.

    Without locks every process makes it for itself, and the last to finish is kept.
    """
    while not done.is_file():
        try:
            lock = take_file_lock(done.with_suffix(".lock"), str(os.getpid()).encode())
        except LocksUnsupported:
            return
        if lock is not None:
            held.callback(lock.release)
            return
        time.sleep(_POLL_S)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheUnwritable(path=str(directory), reason=error.strerror or str(error)) from error


def _write(path: Path, array: np.ndarray) -> None:
    """Write under another name first: a file that has its name is whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.save(file, array)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
