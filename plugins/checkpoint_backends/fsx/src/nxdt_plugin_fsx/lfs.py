"""Calls of ``lfs``, the command of the Lustre client. Its arguments and answers are those of lfs(1), nothing more."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from enum import IntFlag
from itertools import islice
from pathlib import Path
from typing import final

from nxdt_plugin_fsx.config import FsxStorageConfig
from nxdt_plugin_fsx.errors import LfsFailed

__all__ = ["HsmState", "Lfs", "find_lfs"]

_FILES = 200
"""Files of one call: of the longest paths, as many as a command line takes."""
_SHOWN = 4
"""Arguments that a message shows of a call."""
_UNITS = ((2**30, "G"), (2**20, "M"), (2**10, "K"))
_STATE = re.compile(r": \((0x[0-9a-f]+)\)", re.IGNORECASE)


class HsmState(IntFlag):
    """What Lustre knows of a file's copy, ``enum hsm_states`` of llapi_hsm_state_get(3)."""

    EXISTS = 0x01
    DIRTY = 0x02
    RELEASED = 0x04
    ARCHIVED = 0x08
    NORELEASE = 0x10
    NOARCHIVE = 0x20
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
        found = [HsmState(int(match[-1], 16)) for line in lines if (match := _STATE.findall(line))]
        if len(found) != len(files):
            raise LfsFailed(where=f"{self._path} hsm_state", reason=f"it reported {len(found)} of {len(files)} files")
        return found

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


def find_lfs(timeout_s: float) -> Lfs | None:
    """``lfs`` on the path of this process, or None."""
    path = shutil.which("lfs")
    return None if path is None else Lfs(path, timeout_s)


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
