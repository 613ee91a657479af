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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntFlag
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import final
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


class HsmState(IntFlag):
    """State of a file's copy in Lustre: what is used here of ``enum hsm_states`` of llapi_hsm_state_get(3)."""

    DIRTY = 0x02
    ARCHIVED = 0x08
    LOST = 0x40


@final
class Lfs:
    """The command at ``path``; every method raises :class:`LfsFailed`."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def set_stripe(self, directory: Path, config: FsxStorageConfig) -> None:
        """Lay out files that will be made in ``directory``, progressively by their size, lfs-setstripe(1)."""
        size = ("-S", _size(config.stripe_size_bytes))
        components = (
            (_size(config.stripe_above_bytes), 1),
            (_size(config.stripe_all_above_bytes), config.stripe_count),
            ("-1", -1),
        )
        layout = [word for end, count in components for word in ("-E", end, "-c", str(count), *size)]
        self._run("setstripe", *layout, str(directory))

    def archive(self, files: Sequence[Path]) -> None:
        """Queue ``files`` for export to the repository, lfs-hsm_archive(1)."""
        for batch in _batches(files):
            self._run("hsm_archive", *batch)

    def states(self, files: Sequence[Path]) -> list[HsmState]:
        """Return what is known of the copies of ``files``, in any order, lfs-hsm_state(1)."""
        lines = [line for batch in _batches(files) for line in self._run("hsm_state", *batch).splitlines()]
        hsm_states = [HsmState(int(match[-1], 16)) for line in lines if (match := _STATE.findall(line))]
        if len(hsm_states) != len(files):
            raise LfsFailed(
                where=f"{self._path} hsm_state", reason=f"it reported {len(hsm_states)} of {len(files)} files"
            )
        return hsm_states

    def _run(self, *words: str) -> str:
        more = "" if len(words) <= _SHOWN else " …"
        shown = shlex.join([self._path, *words[:_SHOWN]]) + more
        try:
            done = subprocess.run(
                [self._path, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=self._timeout_s,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired as error:
            raise LfsFailed(where=shown, reason=f"it had not ended after {self._timeout_s:g} s") from error
        except OSError as error:
            raise LfsFailed(where=shown, reason=error.strerror or str(error)) from error
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split()) or "it said nothing"
            raise LfsFailed(where=shown, reason=f"exit status {done.returncode}, {said}")
        return done.stdout


def _batches(files: Sequence[Path]) -> Iterator[list[str]]:
    names = map(str, files)
    while batch := list(islice(names, _FILES)):
        yield batch


def _size(count: int) -> str:
    """Bytes as lfs takes them: ``64M``."""
    for unit, letter in _UNITS:
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


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
            self._lfs.archive(self._files(prefix))
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
        step, is_section = path.parent.parent, path.name in _STRIPED and step_of(path.parent.parent.name) is not None
        if not (self._config.stripe and is_section and step.parent == self._root) or self._lfs is None:
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

    def _files(self, prefix: str) -> list[Path]:
        return [self._root / info.key for info in self.list(prefix)]

    @cached_property
    def _on_lustre(self) -> bool:
        mount = mount_of(self._root)
        return mount is not None and mount.filesystem == "lustre"

    @cached_property
    def _lfs(self) -> Lfs | None:
        """The command ``lfs``; None on another file system or if it is not installed."""
        path = shutil.which("lfs") if self._on_lustre else None
        return None if path is None else Lfs(path, self._config.lfs_timeout_s)

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
