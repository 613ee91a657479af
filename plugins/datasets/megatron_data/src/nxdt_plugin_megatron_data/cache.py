"""Keeps indices in files that all processes of a node map, where the directory can be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from nxdt_core.data.cache import cached_arrays
from nxdt_plugin_megatron_data.indices import Indices

__all__ = ["cached_indices"]

_log = logging.getLogger("nxdt.data")


def cached_indices(directory: Path, name: str, build: Callable[[], Indices]) -> Indices:
    """Return the index ``name`` of ``directory``, built where it is missing or damaged.

    Where the directory cannot be written, the index stays in the memory of this process, and a warning says so.
    """

    def unkept(error: OSError) -> None:
        reason = error.strerror or str(error)
        _log.warning("%s: cannot keep an index there (%s); each process builds its own", directory, reason)

    return cached_arrays(directory, name, Indices, build, unkept)
