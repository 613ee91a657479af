"""A directory of FSx for Lustre: the local store, whose shards are striped and, if asked for, exported.

Where the directory is not on Lustre, or ``lfs`` is missing, it is the local store and says so once. What ``lfs`` fails
with is reported and costs no checkpoint: striping is about speed, and the export about a second copy.
"""

from __future__ import annotations

import errno
import logging
import shlex
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from nxdt_core.checkpoint.format.file_names import SECTIONS, step_of
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.file_lock import FileLock, mount_of
from nxdt_plugin_fsx.config import FsxStorageConfig
from nxdt_plugin_fsx.errors import ArchivingFailed, LfsFailed, LfsMissing, NotLustre, StripingFailed
from nxdt_plugin_fsx.lfs import HsmState, Lfs, find_lfs

__all__ = ["FsxStorage"]

_log = logging.getLogger(__name__)
_reported: set[tuple[str, str]] = set()
"""Root and code of what this process has reported already: a run opens its store again for every save."""
_STRIPED = SECTIONS[:2]
"""Directories of shards; the others hold small files."""


class FsxStorage(LocalStorage):
    """Objects are files below ``fsx:///absolute/path``."""

    scheme = "fsx"

    def __init__(self, uri: str, config: FsxStorageConfig | None = None) -> None:
        self._config = config or FsxStorageConfig()
        super().__init__(uri, self._config)
        self.uri = f"fsx://{quote(str(self._root))}"

    def try_lock(self, key: str, note: bytes) -> FileLock | None:
        """See :class:`nxdt_core.protocols.store.LockableStorage`. It begins each run that saves."""
        self._report_missing()
        return super().try_lock(key, note)

    def after_commit(self, prefix: str) -> None:
        """Sweep as the local store does; queue all files under ``prefix`` for export, where that is asked for."""
        super().after_commit(prefix)
        self._report_missing()
        if self._lfs is None or not self._config.archive:
            return
        try:
            self._lfs.archive(self._files(prefix))
        except LfsFailed as error:
            folder = shlex.quote(str(self._root / prefix))
            command = f"find {folder} -type f -print0 | xargs -0 -n 100 lfs hsm_archive"
            _log.warning("%s", ArchivingFailed(where=f"{self.uri}/{prefix}", reason=error.reason, command=command))

    def archive_state(self, prefix: str) -> str:
        """See :class:`nxdt_core.protocols.store.ArchivingStorage`."""
        files = self._files(prefix)
        if self._lfs is None or not files:
            return ""
        try:
            states = self._lfs.states(files)
        except LfsFailed as error:
            return f"unknown: {error.reason}"
        stale = HsmState.DIRTY | HsmState.LOST
        archived = sum(bool(state & HsmState.ARCHIVED) and not state & stale for state in states)
        lost = sum(bool(state & HsmState.LOST) for state in states)
        part = f"archived {archived} of {len(states)} files" if archived else "not archived"
        return "archived" if archived == len(states) else part + (f", {lost} lost" if lost else "")

    def _make_directory(self, path: Path) -> None:
        """Set the layout of a shard directory before any rank sees it: files written earlier keep another layout."""
        if not self._is_striped(path) or self._lfs is None:
            super()._make_directory(path)
            return
        hidden = self._hidden_path(path.parent)
        hidden.mkdir()
        try:
            self._lfs.set_stripe(hidden, self._config)
        except LfsFailed as error:
            self._report(StripingFailed(where=self.uri, reason=error.reason))
        try:
            hidden.rename(path)  # onto an empty directory of another rank is as good
        except OSError as error:
            with suppress(FileNotFoundError):
                hidden.rmdir()
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "another rank was faster", str(path)) from error
            raise

    def _is_striped(self, path: Path) -> bool:
        is_section = path.name in _STRIPED and step_of(path.parent.parent.name) is not None
        return self._config.stripe and is_section and path.parent.parent.parent == self._root

    def _files(self, prefix: str) -> list[Path]:
        return [self._root / info.key for info in self.list(prefix)]

    @cached_property
    def _on_lustre(self) -> bool:
        mount = mount_of(self._root)
        return mount is not None and mount.filesystem == "lustre"

    @cached_property
    def _lfs(self) -> Lfs | None:
        """The command ``lfs``; None on another file system or if it is not installed."""
        return find_lfs(self._config.lfs_timeout_s) if self._on_lustre else None

    def _report_missing(self) -> None:
        if not self._on_lustre:
            mount = mount_of(self._root)
            reason = "its mount point is unknown" if mount is None else f"{mount.point} is {mount.filesystem}"
            self._report(NotLustre(where=self.uri, reason=reason))
        elif self._lfs is None and (self._config.stripe or self._config.archive):
            self._report(LfsMissing(where=self.uri, reason="there is no command lfs on the PATH"))

    def _report(self, problem: StorageError) -> None:
        if (self.uri, problem.code) not in _reported:
            _reported.add((self.uri, problem.code))
            _log.warning("%s", problem)
