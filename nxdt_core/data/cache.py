"""Digests of data and settings, and arrays in files named by them, which all processes of a node map.

The first process makes the arrays, the others wait for it. They are in a directory that is made under another name and
renamed when it is complete, so that a process that dies while making it leaves nothing that counts. The lock is the
operating system's, which frees it with the process that held it. Where the file system has no locks that other
machines see, each node makes its own arrays.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nxdt_core.file_lock import FileLock, take_file_lock
from nxdt_core.protocols.store import LocksUnsupported
from nxdt_core.regular_files import private_directory, require_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["cached_arrays", "digest", "file_digest"]


_BYTES = 12
"""96 bits: far beyond accidents, and short enough for a message."""
_WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_BLOCKS = 64


def digest(*parts: object) -> str:
    """Return the hexadecimal digest of ``parts``: bytes and arrays by content, everything else by its ``repr``.

    Each part is preceded by its length, so that moving a border between two of them changes the result.
    """
    state = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        if isinstance(part, np.ndarray):
            content: bytes | memoryview = np.ascontiguousarray(part).data.cast("B")
        else:
            content = part if isinstance(part, bytes) else repr(part).encode()
        state.update(f"{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Return the hexadecimal digest of a file: its size and its content.

    Above 64 MiB the content is 64 blocks of 64 KiB, spread evenly from the first to the last: a corpus that was made
    again shows at once, on any machine and in milliseconds, and a few changed bytes of a terabyte may not.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= _WHOLE_BYTES:
            return digest(size, file.read())
        blocks = []
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            blocks.append(file.read(_BLOCK_BYTES))
        return digest(size, *blocks)


_LOOK_AGAIN_S = 0.1

T = TypeVar("T", bound="DataclassInstance")


def cached_arrays(
    directory: Path,
    name: str,
    kind: type[T],
    make: Callable[[], T],
    unkept: Callable[[OSError], None],
    *,
    most_bytes: int | None = None,
) -> T:
    """Return what ``directory`` keeps as ``name``, made where it is missing or damaged.

    Args:
        directory: is made where it is missing.
        name: stands for all that decides the arrays.
        kind: a dataclass of arrays.
        make: is called by one process of a node.
        unkept: receives the reason why nothing can be kept. Where it returns, the arrays stay in the memory of this
            process.
        most_bytes: that the directory may hold; what has not been asked for longest is removed. None sets no limit.
    """
    place = directory / name
    found = _mapped(place, kind)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _wait_for_turn(directory / f"{name}.lock")
    except OSError as error:
        unkept(error)
        return make()
    with _released(directory / f"{name}.lock", lock):
        found = _mapped(place, kind)  # another process may have made it while this one waited
        if found is not None:
            return found
        made = make()
        try:
            _store(place, made)
            _remove_oldest(place, most_bytes)
        except OSError as error:
            unkept(error)
        found = _mapped(place, kind)
        return made if found is None else found


def _mapped(place: Path, kind: type[T]) -> T | None:
    """Return the arrays in ``place``; None where they are missing or damaged."""
    try:
        names = [each.name for each in fields(kind)]
        with suppress(PermissionError):
            os.utime(place)  # the time of its last use
        return kind(**{name: _mapped_array(place / f"{name}.npy") for name in names})
    except (OSError, ValueError, EOFError):
        return None


def _mapped_array(path: Path) -> np.ndarray[Any, Any]:
    require_regular(path)  # a pipe would block
    mapped: np.ndarray[Any, Any] = np.load(path, mmap_mode="r").view(np.ndarray)
    return mapped


def _store(place: Path, made: DataclassInstance) -> None:
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
    try:
        for each in fields(made):
            with (part / f"{each.name}.npy").open("wb") as file:
                np.save(file, getattr(made, each.name))
                file.flush()
                os.fsync(file.fileno())
        part.chmod(0o755)  # mkdtemp admits no other user, and a cache is shared
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        try:
            part.rename(place)
        except OSError:
            if _mapped(place, type(made)) is None:  # not even one of another node, which made the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_oldest(kept: Path, most_bytes: int | None) -> None:
    """Remove arrays next to ``kept`` until the directory holds at most ``most_bytes``; who maps them still has them."""
    if most_bytes is None:
        return
    found = [each for each in kept.parent.iterdir() if each != kept and any(each.glob("*.npy"))]
    sizes = {each: sum(file.stat().st_size for file in each.iterdir()) for each in (kept, *found)}
    for place in sorted(found, key=lambda each: each.stat().st_mtime):
        if sum(sizes.values()) <= most_bytes:
            return
        shutil.rmtree(place, ignore_errors=True)
        del sizes[place]


def _wait_for_turn(path: Path) -> FileLock:
    note = f"process {os.getpid()} makes these arrays\n".encode()
    lock = _try_lock(path, note)
    while lock is None:
        time.sleep(_LOOK_AGAIN_S)
        lock = _try_lock(path, note)
    return lock


@contextmanager
def _released(path: Path, lock: FileLock) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # while it is held: who waits for it finds that its name leads nowhere
        lock.release()


def _try_lock(path: Path, note: bytes) -> FileLock | None:
    try:
        return take_file_lock(path, note)
    except LocksUnsupported:
        own = private_directory(Path(tempfile.gettempdir()) / f"nxdt-locks-{os.geteuid()}")
        return take_file_lock(own / f"{digest(str(path))}.lock", note)
