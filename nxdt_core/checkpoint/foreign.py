"""Checkpoints of other programs: which installed format recognises a path, and its reader. Torch-free.

Formats are components of the kind ``format`` (:mod:`nxdt_core.protocols.format`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import ForeignFormatUnknown
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.plugin import describe_failure
from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader

_log = logging.getLogger(__name__)

_KIND = "format"


def recognise(path: Path, kernel: Kernel) -> RegisteredComponent | None:
    """Return the format of the checkpoint at ``path``; None where no installed format recognises it.

    Raises:
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of their plugins.
    """
    if not path.exists():
        return None
    formats = []
    for component in kernel.registry.all(_KIND):
        try:
            if component.load_class(CheckpointFormat)().recognises(path):
                formats.append(component)
            continue
        except NxdtError as error:
            reason = error.what()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = describe_failure(error)
        # The path may be another format's.
        _log.warning("The checkpoint format %r of %s is skipped: %s", component.record.name, component.dist, reason)
    return kernel.registry.choose(_KIND, str(path), formats) if formats else None


def format_of(path: Path, kernel: Kernel) -> str | None:
    """Return the name of what :func:`recognise` returns."""
    component = recognise(path, kernel)
    return None if component is None else component.record.name


def open_checkpoint(
    path: Path, kernel: Kernel, format: str | None = None, *, fill_rows: bool = False
) -> tuple[str, CheckpointReader]:
    """Return the name of the format of the checkpoint at ``path``, and its reader.

    Args:
        path: a directory or file.
        kernel: knows the installed checkpoint formats.
        format: name of the format; None recognises it.
        fill_rows: rows that a table of the vocabulary lacks become the mean of the others, in formats that can do so.

    Raises:
        ForeignFormatUnknown: nothing is there, or nothing that is recognised.
        UnknownComponent: no plugin offers a format of that name.
        NxdtError: its files are missing or damaged.
    """
    if not path.exists():
        raise _unknown(path, kernel, "it does not exist")
    component = recognise(path, kernel) if format is None else kernel.registry.get(_KIND, format)
    if component is None:
        raise _unknown(path, kernel, "no installed format recognises its files")
    chosen = component.load_class(CheckpointFormat)()
    if format is not None and not chosen.recognises(path):
        raise _unknown(path, kernel, f"it is not of the format {format!r}")
    reader = chosen.open(path)
    reader.fill_rows = fill_rows
    return component.record.name, reader


def _unknown(path: Path, kernel: Kernel, reason: str) -> NxdtError:
    formats = [f"{component.record.name}: {component.record.summary}" for component in kernel.registry.all(_KIND)]
    install, unusable = kernel.registry.not_offered(_KIND)
    return ForeignFormatUnknown(path=str(path), reason=reason, formats=formats, install=install, unusable=unusable)
