"""A directory of FSx for Lustre: the local store, whose shards are striped and, if asked for, exported.

Where the directory is not on Lustre, or ``lfs`` is missing, it is the local store and says so once. A failure of
``lfs`` is reported and costs no checkpoint: striping is about speed, and the export about a second copy.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from enum import IntFlag
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from nxdt_core.checkpoint.format.file_names import SECTIONS, step_of
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.system.file_lock import FileLock, mount_of
from nxdt_plugin_fsx.config import FsxStorageConfig
from nxdt_plugin_fsx.errors import ArchivingFailed, LfsFailed, LfsMissing, NotLustre, StripingFailed

_FILES = 200
"""Files of one call: of the longest paths, as many as a command line takes."""
_SHOWN = 4
"""Arguments that a message shows of a call."""
_UNITS = ((2**30, "G"), (2**20, "M"), (2**10, "K"))
_STATE = re.compile(r": \((0x[0-9a-f]+)\)", re.IGNORECASE)


_log = logging.getLogger(__name__)
_reported: set[tuple[str, str]] = set()
"""Root and code of what this process has reported already: a run opens its store again for every save."""
_STRIPED = SECTIONS[:2]
"""Directories of shards; the others hold small files."""


class HsmState(IntFlag):
    """State of a file's copy in Lustre: what is used here of ``enum hsm_states`` of llapi_hsm_state_get(3)."""

    DIRTY = 0x02
    ARCHIVED = 0x08
    LOST = 0x40


def _size(count: int) -> str:
    """Bytes as lfs takes them: ``64M``."""
    for unit, letter in _UNITS:
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


class FsxStorage(LocalStorage):
    """Objects are files below ``fsx:///absolute/path``."""

    scheme = "fsx"

    def __init__(self, uri: str, config: FsxStorageConfig | None = None) -> None:
        self._config = config or FsxStorageConfig()
        super().__init__(uri, self._config)
        self.uri = f"fsx://{quote(str(self._root))}"

    def try_lock(self, key: str, note: bytes) -> FileLock | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`. It begins each run that saves."""
        self._report_missing()
        return super().try_lock(key, note)

    def after_commit(self, prefix: str) -> None:
        """Sweep as the local store does; queue all files under ``prefix`` for export, where that is asked for."""
        super().after_commit(prefix)
        self._report_missing()
        if self._lfs is None or not self._config.archive:
            return
        try:
            self._run(["hsm_archive"], self._files(prefix))
        except LfsFailed as error:
            folder = shlex.quote(str(self._root / prefix))
            command = f"find {folder} -type f -print0 | xargs -0 -n 100 lfs hsm_archive"
            _log.warning("%s", ArchivingFailed(where=f"{self.uri}/{prefix}", reason=error.reason, command=command))

    def archive_state(self, prefix: str) -> str:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        files = self._files(prefix)
        if self._lfs is None or not files:
            return ""
        try:
            lines = self._run(["hsm_state"], files)
        except LfsFailed as error:
            return f"unknown: {error.reason}"
        states = [HsmState(int(match[-1], 16)) for line in lines if (match := _STATE.findall(line))]
        if len(states) != len(files):
            return f"unknown: it reported {len(states)} of {len(files)} files"
        stale = HsmState.DIRTY | HsmState.LOST
        archived = sum(bool(state & HsmState.ARCHIVED) and not state & stale for state in states)
        lost = sum(bool(state & HsmState.LOST) for state in states)
        part = f"archived {archived} of {len(states)} files" if archived else "not archived"
        return "archived" if archived == len(states) else part + (f", {lost} lost" if lost else "")

    def _make_directory(self, path: Path) -> None:
        """Set the layout of a shard directory before any rank sees it: files written earlier keep another layout."""
        step, is_section = path.parent.parent, path.name in _STRIPED and step_of(path.parent.parent.name) is not None
        if not (self._config.stripe and is_section and step.parent == self._root) or self._lfs is None:
            super()._make_directory(path)
            return
        hidden = self._hidden_path(path.parent)
        hidden.mkdir()
        size = ("-S", _size(self._config.stripe_size_bytes))
        components = (  # progressively by the size of a file, lfs-setstripe(1)
            (_size(self._config.stripe_above_bytes), 1),
            (_size(self._config.stripe_all_above_bytes), self._config.stripe_count),
            ("-1", -1),
        )
        layout = [word for end, count in components for word in ("-E", end, "-c", str(count), *size)]
        try:
            self._run(["setstripe", *layout], [hidden])
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

    def _files(self, prefix: str) -> list[Path]:
        return [self._root / info.key for info in self.list(prefix)]

    @cached_property
    def _on_lustre(self) -> bool:
        mount = mount_of(self._root)
        return mount is not None and mount.filesystem == "lustre"

    @cached_property
    def _lfs(self) -> str | None:
        """The path of the command ``lfs``; None on another file system or if it is not installed."""
        return shutil.which("lfs") if self._on_lustre else None

    def _run(self, words: Sequence[str], files: Sequence[Path]) -> list[str]:
        """Return what ``lfs`` prints for ``files``, in lines.

        Raises:
            LfsFailed: it cannot be run, takes too long or fails.
        """
        assert self._lfs is not None
        lines: list[str] = []
        for start in range(0, len(files), _FILES):
            command = [self._lfs, *words, *map(str, files[start : start + _FILES])]
            shown = shlex.join(command[: _SHOWN + 1]) + (" …" if len(command) > _SHOWN + 1 else "")
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="surrogateescape",
                    timeout=self._config.lfs_timeout_s,
                    check=False,
                    env={**os.environ, "LC_ALL": "C"},
                )
            except subprocess.TimeoutExpired as error:
                reason = f"it had not ended after {self._config.lfs_timeout_s:g} s"
                raise LfsFailed(where=shown, reason=reason) from error
            except OSError as error:
                raise LfsFailed(where=shown, reason=error.strerror or str(error)) from error
            if done.returncode != 0:
                output = " ".join((done.stderr or done.stdout).split()) or "it said nothing"
                raise LfsFailed(where=shown, reason=f"exit status {done.returncode}, {output}")
            lines += done.stdout.splitlines()
        return lines

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
