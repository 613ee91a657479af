"""The C library's allocator in processes that train on the host: freed tensors leave their pages to the next ones.

By default glibc maps memory for each large tensor and unmaps it when the tensor is freed, or returns the end of its
heap to the system. Every step then takes the page faults of all its tensors.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of ``mallopt``'s parameters, from glibc's ``malloc.h``."""
_MIB = 2**20
_SETTINGS = {_MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 1024 * _MIB, _TOP_PAD: 64 * _MIB}
"""32 MiB is the most that glibc takes for the first: larger tensors are mapped as before."""


def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB of memory that tensors have freed, and return whether it does.

    It changes nothing where one of glibc's own variables, or ``GLIBC_TUNABLES``, configures the allocator, and in C
    libraries without ``mallopt``.
    """
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(parameter, value) for parameter, value in _SETTINGS.items())
