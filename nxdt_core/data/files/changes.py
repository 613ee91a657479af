"""Sizes of files that a run keeps reading, compared with those at its start.

Access to a page beyond the end of a mapped file kills the process (SIGBUS), and a shorter file of records looks like a
complete one. So code that maps or reads a file again checks its size first. Two cases remain undetected: a file that is
truncated between the check and the read, and a file that is overwritten with as many bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nxdt_core.errors.data import DataFileChanged

__all__ = ["WatchedFiles"]


class WatchedFiles:
    """Files, and their sizes when this was made.

    Args:
        paths: the files; one that does not exist is left to the code that opens it.
        may_grow: whether more bytes behind the known ones do no harm.
    """

    def __init__(self, paths: Iterable[Path], *, may_grow: bool) -> None:
        found = ((path, _size(path)) for path in paths)
        self._sizes = {path: size for path, size in found if size is not None}
        self._may_grow = may_grow

    def check(self, *paths: Path) -> None:
        """Compare the size of ``paths``, or of all files, with what it was; one that is gone may still be open.

        Raises:
            DataFileChanged: it is another one.
        """
        for path in paths or self._sizes:
            before, now = self._sizes.get(path), _size(path)
            if before is None or now is None or now == before or (self._may_grow and now > before):
                continue
            raise DataFileChanged(path=str(path), before=before, now=now)


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
