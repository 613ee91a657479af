"""Digests of data and settings, and arrays in files named by them, which all processes of a node map.

The first process makes the arrays, the others wait for it. They are in a directory that is made under another name and
renamed when it is complete, so that a process that dies while making it leaves nothing that counts; the next process
that makes arrays removes it. The lock is the operating system's, which frees it with the process that held it. Where
the file system has no locks that other machines see, each node makes its own arrays, and removes nothing.

The directory has the digest of each array, and arrays that differ from it are made again. As in an unsigned checkpoint,
the digests are xxh3: they show damage, and not the changes of a user who can also write the digests. Therefore types,
lengths and offsets of the arrays are compared, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from xxhash import xxh3_128

from nxdt_core.protocols.store import LocksUnsupported
from nxdt_core.system.file_lock import FileLock, take_file_lock
from nxdt_core.system.regular_files import open_regular, private_directory, read_text, replace_text, require_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_BYTES = 12
"""96 bits: far beyond accidents, and short enough for a message."""
SAMPLED_FROM_BYTES = 64 << 20
"""Size of a file above which :func:`file_digest` reads only blocks of it."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 64

_DIGESTS = "digests.json"
_READ_BYTES = 1 << 20
_SETTLED_S = 2
"""Longest step of a file system's clock: two changes within it may leave the same time."""
_LOOK_AGAIN_S = 0.1
_PART = re.compile(rf"\.(.*[0-9a-f]{{{2 * _BYTES}}})-[a-z0-9_]{{8}}")
"""Name of a directory of unfinished arrays, whose own name ends with a digest."""
T = TypeVar("T", bound="DataclassInstance")
_DAMAGED = (OSError, ValueError, TypeError, IndexError, OverflowError, MemoryError, RecursionError, TokenError)
"""Errors of reading arrays that are missing or damaged; numpy parses a header as Python."""


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
    again shows at once, on any machine and in milliseconds, and a few changed bytes of a terabyte may not. What is
    derived from the content and kept needs :func:`content_digests`.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= SAMPLED_FROM_BYTES:
            return digest(size, file.read())
        blocks = []
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            blocks.append(file.read(_BLOCK_BYTES))
        return digest(size, *blocks)


def content_digests(paths: Iterable[Path], directory: Path | None) -> list[str]:
    """Return the xxh3 digest of the whole content of each file; reading takes 0.05 to 0.2 CPU-seconds per GiB.

    ``directory`` keeps the digests of files above 64 MiB. Such a file is read again only after its inode, size, or
    time of modification or change is another one. Tools can set the time of modification, but not the time of change.

    Raises:
        OSError: a file cannot be read.
    """
    cache_file = None if directory is None else directory / _DIGESTS
    recorded: dict[str, list[object]] = {}
    if cache_file is not None:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            recorded = dict(json.loads(read_text(cache_file)))
    digests: list[str] = []
    read: dict[str, list[object]] = {}
    for path in paths:
        with open(open_regular(path, follow=True), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            identity = [before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns]
            match recorded.get(str(path.absolute())):
                case [*same, str(content)] if same == identity:
                    digests.append(content)
                    continue
            settled = max(before.st_mtime, before.st_ctime) + _SETTLED_S < time.time()
            state, block = xxh3_128(), memoryview(bytearray(_READ_BYTES))
            while count := file.readinto(block):
                state.update(block[:count])
            digests.append(state.hexdigest())
            if settled and before.st_size > SAMPLED_FROM_BYTES:
                read[str(path.absolute())] = [*identity, digests[-1]]
    if cache_file is not None and read:
        remembered = {path: entry for path, entry in recorded.items() if os.path.exists(path)} | read
        with suppress(OSError):  # then they are read again
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(cache_file, json.dumps(remembered, indent=0))
    return digests


def cached_arrays(
    directory: Path | None,
    name: str,
    kind: type[T],
    make: Callable[[], T],
    on_error: Callable[[OSError], None] | None,
    fits: Callable[[T], bool],
    *,
    most_bytes: int | None = None,
) -> T:
    """Return what ``directory`` keeps as ``name``, made where it is missing or damaged.

    Args:
        directory: is made where it is missing. None keeps nothing.
        name: stands for all that decides the arrays; it ends with a :func:`digest` of it.
        kind: a dataclass of arrays.
        make: is called by one process of a node.
        on_error: receives the reason why nothing can be kept. Where it returns, the arrays stay in the memory of this
            process. None warns.
        fits: whether mapped arrays have the types and lengths of each other, as in :func:`is_array` and
            :func:`are_offsets`; what does not is damaged.
        most_bytes: that the directory may hold; what has not been asked for longest is removed. None sets no limit.
    """
    if directory is None:
        return make()
    on_error = on_error or _warn
    place = directory / name
    with suppress(*_DAMAGED):
        return _mapped(place, kind, fits)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        note = f"process {os.getpid()} makes these arrays\n".encode()
        while (lock := _try_lock(directory / f"{name}.lock", note)) is None:
            time.sleep(_LOOK_AGAIN_S)
    except OSError as error:
        on_error(error)
        return make()
    with _released(directory / f"{name}.lock", lock):
        try:
            return _mapped(place, kind, fits)  # another process may have made it while this one waited
        except _DAMAGED as error:
            if place.exists():
                _log.warning("%s is damaged and is made again: %s", place, error)
        made = make()
        try:
            _store(place, made, fits)
            _remove_oldest(place, most_bytes)
        except OSError as error:
            on_error(error)
        with suppress(*_DAMAGED):
            return _mapped(place, kind, fits)
        return made


def _warn(error: OSError) -> None:
    _log.warning("%s: cannot keep tokens there; each process makes its own", error)


def is_array(array: NDArray[Any], kinds: str, *shape: int) -> bool:
    """Return whether ``array`` has this shape, and one of these kinds of dtype (``dtype.kind``)."""
    return array.shape == shape and array.dtype.kind in kinds


def are_offsets(starts: NDArray[Any], end: int) -> bool:
    """Return whether ``starts`` begin at 0, never fall, and end at ``end``."""
    falls = starts[1:] < starts[:-1]
    return is_array(starts, "i", len(starts)) and starts[0] == 0 and starts[-1] == end and not falls.any()


def _mapped(place: Path, kind: type[T], fits: Callable[[T], bool]) -> T:
    """Return the arrays in ``place``, compared with their digests."""
    files = {item.name: place / f"{item.name}.npy" for item in fields(kind)}
    for path in files.values():
        require_regular(path)  # a pipe would block
    with suppress(PermissionError):
        os.utime(place)  # the time of its last use
    if json.loads(read_text(place / _DIGESTS)) != _digests(place.name, files, place.parent):
        raise ValueError("its arrays differ from their digests")
    arrays = kind(**{name: open_memmap(path, mode="r").view(np.ndarray) for name, path in files.items()})
    if not fits(arrays):
        raise ValueError("its arrays contradict each other")
    return arrays


def _digests(name: str, files: Mapping[str, Path], directory: Path | None) -> dict[str, str]:
    """Return the digest of each array, and the name of all: arrays under another name are not the wanted ones."""
    return {"": name, **dict(zip(files, content_digests(files.values(), directory), strict=True))}


def _store(place: Path, made: T, fits: Callable[[T], bool]) -> None:
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
    try:
        files = {item.name: part / f"{item.name}.npy" for item in fields(made)}
        for name, path in files.items():
            with path.open("wb") as file:
                np.save(file, getattr(made, name))
                file.flush()
                os.fsync(file.fileno())
        replace_text(part / _DIGESTS, json.dumps(_digests(place.name, files, None)))
        part.chmod(0o755)  # mkdtemp admits no other user, and a cache is shared
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        try:
            part.rename(place)
        except OSError:
            with suppress(*_DAMAGED):
                _mapped(place, type(made), fits)  # of another node, which made the same
                return
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    """Remove what killed processes have left, whose locks are free."""
    for part in directory.iterdir():
        match = _PART.fullmatch(part.name)
        if match is None:
            continue
        path = directory / f"{match[1]}.lock"
        with suppress(OSError):  # among them: no locks that every machine sees, or a lock of another user
            lock = take_file_lock(path, f"process {os.getpid()} removes unfinished arrays\n".encode())
            if lock is not None:
                with _released(path, lock):
                    shutil.rmtree(part, ignore_errors=True)


def _remove_oldest(current: Path, most_bytes: int | None) -> None:
    """Remove arrays next to ``current`` until the directory holds at most ``most_bytes``; who maps them still has
    them."""
    if most_bytes is None:
        return
    others = (entry for entry in current.parent.iterdir() if entry != current and not _PART.fullmatch(entry.name))
    complete = [entry for entry in others if any(entry.glob("*.npy"))]
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in (current, *complete)}
    for place in sorted(complete, key=lambda entry: entry.stat().st_mtime):
        if sum(sizes.values()) <= most_bytes:
            return
        shutil.rmtree(place, ignore_errors=True)
        del sizes[place]


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
        folder = private_directory(Path(tempfile.gettempdir()) / f"nxdt-locks-{os.geteuid()}")
        return take_file_lock(folder / f"{digest(str(path))}.lock", note)
