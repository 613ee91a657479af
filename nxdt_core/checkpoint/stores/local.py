"""The built-in store of checkpoints: a directory of any mounted file system.

An object is written under a hidden temporary name, flushed, and renamed; readers see it whole or not at all. A
writer holds a lock on its temporary file, so that the leftovers of a killed writer differ from work in progress
and are deleted after the next commit.

The root may be a symbolic link. Below it links are not followed, neither to read nor to write nor to delete, and what
is not a regular file is not opened: a directory may come from another user. A listing shows such an entry under its own
name with no bytes, and to open it is an error that names it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, ClassVar, cast
from urllib.parse import unquote, urlsplit

from nxdt_core.checkpoint.storage import explained
from nxdt_core.config.schema import LocalStorageConfig
from nxdt_core.errors.checkpoints import BadStorageKey, BadStorageUri, LockIsNoFile
from nxdt_core.protocols.store import CheckpointStore, ObjectInfo
from nxdt_core.system.file_lock import FileLock, take_file_lock
from nxdt_core.system.paths import expand_home
from nxdt_core.system.regular_files import NotRegularFile, open_regular, require_regular

__all__ = ["LocalStorage"]


_TEMPORARY = ".nxdt-tmp-"
"""Prefix of names that are being written; keys may not use it, and :meth:`LocalStorage.list` never shows it."""
_LOCK = ".nxdt-lock-"
"""Prefix of the files of locks, directly below the root; hidden and refused likewise, and never swept."""
_HIDDEN = (_TEMPORARY, _LOCK)
_ATTEMPTS = 100
"""Times that a directory is made again when another process removed it, empty, between two calls."""
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalStorage(CheckpointStore):
    """Objects are files below ``uri``: a plain path, absolute, relative or with ``~``, or ``file:///absolute/path``.

    Nothing is created before the first write. Raises :class:`StorageError` subclasses for a full disk, missing
    rights and files in the way; other ``OSError`` pass. A store of a file system that can do more derives from it.
    """

    scheme: ClassVar[str] = "file"

    def __init__(self, uri: str, config: LocalStorageConfig | None = None) -> None:
        if "\0" in unquote(uri) or not uri.strip():
            raise BadStorageUri(where=uri, reason="it is empty or holds a NUL")
        if uri.startswith(f"{self.scheme}:"):
            split = urlsplit(uri)
            if split.netloc not in ("", "localhost"):
                reason = "the path begins at the third slash, and the text before it is a host"
                raise BadStorageUri(where=uri, reason=reason)
            if not split.path.startswith("/"):
                raise BadStorageUri(where=uri, reason=f"a {self.scheme}:// address is absolute")
            self._root = Path(unquote(split.path)).absolute()
        else:
            self._root = expand_home(uri).absolute()
        self._fsync = (config or LocalStorageConfig()).fsync
        self.uri = str(self._root)

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        path = self._path(key)
        with self._explained(path), self._temporary(path.parent) as (stream, temporary):
            yield cast(BinaryIO, stream)
            self._flush(stream)
            temporary.replace(path)
            self._sync_directory(path.parent)

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        path = self._path(key)
        with self._explained(path):
            try:
                self._require_no_links(path.parent)
                raw = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115  (closed with the Section below)
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
            with raw, io.BufferedReader(_FileRange(raw, start, length)) as stream:
                yield cast(BinaryIO, stream)

    def stat(self, key: str) -> ObjectInfo | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        path = self._path(key)
        with self._explained(path):
            try:
                self._require_no_links(path.parent)
                status = require_regular(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            return ObjectInfo(key=key, size_bytes=status.st_size, modified=status.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self._root
        with self._explained(start):
            _require_directory(self._root)
            self._require_no_links(start)
            keys = f"{folder}/" if folder else ""
            objects = [info for info in self._walk(str(start), keys, prefix) if info.key.startswith(prefix)]
        yield from sorted(objects, key=lambda info: info.key)

    def delete_many(self, keys: Iterable[str]) -> None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`. Directories left empty go too."""
        folders: dict[Path, None] = {}
        for key in keys:
            path = self._path(key)
            with self._explained(path), suppress(FileNotFoundError, NotADirectoryError):
                self._require_no_links(path.parent)
                path.unlink()
                folders[path.parent] = None
        for folder in folders:
            self._sync_directory(folder)
        for folder in folders:
            self._remove_empty(folder)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        path = self._path(key)
        with self._explained(path), self._temporary(path.parent) as (stream, temporary):
            stream.write(data)
            self._flush(stream)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                return self._create_exclusively(path, data)
            self._sync_directory(path.parent)
            return True

    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`.

        Replacers take turns by a lock on the directory, which is taken once the bytes are on the disk: who hangs
        while writing them blocks no other process, and replaces nothing later.
        """
        path = self._path(key)
        if self.stat(key) is None:
            return False
        with self._explained(path), self._temporary(path.parent) as (stream, temporary):
            stream.write(data)
            self._flush(stream)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(folder, fcntl.LOCK_EX)
                if _read_bytes(path) != expected:
                    return False
                temporary.replace(path)
            except FileNotFoundError:
                return False
            finally:
                os.close(folder)
            self._sync_directory(path.parent)
            return True

    def try_lock(self, key: str, note: bytes) -> FileLock | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        with self._explained(self._root):
            self._make_folder(self._root)
            path = self._root / f"{_LOCK}{key}"
            try:
                return take_file_lock(path, note)
            except NotRegularFile as error:
                raise LockIsNoFile(where=str(path), reason=str(error.strerror)) from error
            except IsADirectoryError as error:
                raise LockIsNoFile(where=str(path), reason="it is a directory, not a regular file") from error

    def lock_note(self, key: str) -> bytes:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        with self._explained(self._root), suppress(FileNotFoundError):
            return _read_bytes(self._root / f"{_LOCK}{key}")
        return b""

    def after_commit(self, prefix: str) -> None:
        """Sweep what killed writers left below the root."""
        with suppress(OSError):
            for folder, folders, files in os.walk(self._root, topdown=False):
                if any(name.startswith(_TEMPORARY) for name in (*folders, *files)):
                    self._remove_empty(Path(folder))

    def _path(self, key: str) -> Path:
        """The file of ``key``; refuses keys that would leave the root."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts) or "\0" in key or "\\" in key:
            raise BadStorageKey(where=key, reason="it must be names joined by '/', without '..' and empty ones")
        if any(part.startswith(_HIDDEN) for part in parts):
            raise BadStorageKey(where=key, reason=f"names that begin with {_TEMPORARY!r} or {_LOCK!r} are taken")
        return self._root.joinpath(*parts)

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Raise a :class:`StorageError` for what a user can fix; let other ``OSError`` pass."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            named = Path(error.filename) if isinstance(error.filename, str) else path
            shown = path if named.name.startswith(_TEMPORARY) else named
            explanation = explained(error, str(shown))
            if explanation.code == "NXDT-S000":
                raise
            raise explanation from error

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
        """A new, locked, hidden file in ``folder``. Unless it was renamed it is gone afterwards, and after an
        exception so are the directories that were made for it."""
        for _ in range(_ATTEMPTS):
            path = self._hidden_path(folder)
            try:
                self._make_folder(folder)
                stream = open(path, "xb")  # noqa: SIM115  (closed below)
            except FileNotFoundError:  # a directory was removed, empty, by a concurrent delete_many
                continue
            with suppress(OSError):  # some network file systems have no locks; there leftovers are not swept
                fcntl.flock(stream, fcntl.LOCK_EX)
            if os.fstat(stream.fileno()).st_nlink:
                break
            stream.close()  # swept between its creation and its lock
        else:
            reason = "the directory vanishes as soon as it is made, or is a dangling link"
            raise FileNotFoundError(errno.ENOENT, reason, str(folder))
        try:
            with stream:
                yield stream, path
        except BaseException:
            path.unlink(missing_ok=True)
            self._remove_empty(folder)
            raise
        path.unlink(missing_ok=True)

    def _require_no_links(self, folder: Path) -> None:
        """Refuse symbolic links on the way from the root to ``folder``."""
        path = str(self._root)
        for name in folder.relative_to(self._root).parts:
            path = os.path.join(path, name)
            try:
                is_link = stat.S_ISLNK(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return
            if is_link:
                raise NotRegularFile(errno.ELOOP, "it is a symbolic link", path)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, so that new directories survive a power failure."""
        self._require_no_links(folder)
        missing: list[Path] = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        _require_directory(folder)
        for path in reversed(missing):
            try:
                self._make_directory(path)
            except FileExistsError:  # another writer was faster (and perhaps a deleter faster still)
                _require_directory(path)
                continue
            self._sync_directory(path.parent)

    def _make_directory(self, path: Path) -> None:
        """Make one directory; raises ``FileExistsError`` where another writer was faster."""
        path.mkdir()

    @staticmethod
    def _hidden_path(folder: Path) -> Path:
        """A new name in ``folder`` that no listing shows, for what gets its own name later."""
        return folder / f"{_TEMPORARY}{secrets.token_hex(8)}"

    def _flush(self, stream: IO[bytes]) -> None:
        stream.flush()
        if self._fsync:
            os.fsync(stream.fileno())

    def _sync_directory(self, folder: Path) -> None:
        """Make names in ``folder`` durable: a rename lives in the directory, not in the file."""
        if not self._fsync:
            return
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _create_exclusively(self, path: Path, data: bytes) -> bool:
        """Create the object on file systems without hard links. A crash in here leaves a torn object, never two
        winners."""
        try:
            stream = open(path, "xb")  # noqa: SIM115  (closed just below)
        except FileExistsError:
            return False
        try:
            with stream:
                stream.write(data)
                self._flush(stream)
        except BaseException:
            path.unlink()
            raise
        self._sync_directory(path.parent)
        return True

    def _walk(self, folder: str, keys: str, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below ``folder``, whose keys begin with ``keys``; directories that hold no key with ``prefix`` are
        left out."""
        try:
            with os.scandir(folder) as opened:
                entries = list(opened)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith(_HIDDEN):
                continue
            key = f"{keys}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if prefix.startswith(f"{key}/") or f"{key}/".startswith(prefix):
                    yield from self._walk(entry.path, f"{key}/", prefix)
                continue
            with suppress(FileNotFoundError):  # deleted since the directory was read
                status = entry.stat(follow_symlinks=False)
                size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                yield ObjectInfo(key=key, size_bytes=size, modified=status.st_mtime)

    def _remove_empty(self, folder: Path) -> None:
        """Remove ``folder`` and its parents below the root as long as only abandoned temporary files are in them."""
        while folder != self._root and folder.is_relative_to(self._root):
            with suppress(OSError):
                for path in folder.glob(f"{_TEMPORARY}*"):
                    with suppress(OSError):
                        path.rmdir()  # fails for files; a process that is about to rename it makes another
                    with suppress(OSError), open(open_regular(path), "rb") as stream:  # one with a living writer stays
                        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent


def _require_directory(path: Path) -> None:
    """Name what is in the way; a path that does not exist is not."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.stat().st_mode):  # one call: another process may remove it between two
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(path))


def _read_bytes(path: Path) -> bytes:
    with open(open_regular(path), "rb") as stream:
        return stream.read()


class _FileRange(io.RawIOBase):
    """The bytes ``[start, start + length)`` of a file."""

    def __init__(self, raw: io.FileIO, start: int, length: int | None) -> None:
        raw.seek(start)
        self._raw = raw
        self._left = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        if self._left is None:
            return self._raw.readinto(buffer)
        count = self._raw.readinto(memoryview(buffer)[: self._left])
        self._left -= count or 0
        return count
