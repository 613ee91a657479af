"""Errors about a run's directory that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_core.errors.training import CannotWriteRunDirectory

__all__ = ["cannot_write", "run_dir_explained"]


@contextmanager
def run_dir_explained(config: ResolvedConfig) -> Iterator[None]:
    """Turn an ``OSError`` of the block into :class:`CannotWriteRunDirectory`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(config.run_dir, error) from error


def cannot_write(run_dir: Path, error: OSError) -> NxdtError:
    """Return the error of a run whose directory cannot be written; its reason names the file, if the system does."""
    reason = error.strerror or str(error)
    name = os.path.relpath(os.fsdecode(error.filename), run_dir) if error.filename is not None else "."
    if name.partition(os.sep)[0] not in (".", ".."):
        reason = f"{name}: {reason}"
    return CannotWriteRunDirectory(path=str(run_dir), reason=reason)
