"""When a file that a process has read need not be read again.

Kernels are started many times in a process, by each :func:`nxdt_core.config.load`, and look at the same files.
"""

from __future__ import annotations

import os
import time

__all__ = ["version_of"]

_SETTLED_NS = 2_000_000_000
"""A file that changed within this time may change again with the same timestamp, because file systems round it."""


def version_of(found: os.stat_result) -> tuple[int, ...] | None:
    """Return values that differ between two versions of a file; None if the file is too new to distinguish them."""
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
