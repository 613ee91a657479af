"""Checkpoints of other programs: which installed format recognises a path, and its reader. Torch-free.

Formats are components of the kind ``format`` (:mod:`nxdt_core.protocols.format`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from nxdt_core.errors import NxdtError
from nxdt_core.errors.exchange import ForeignFormatUnknown
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.defect import GUARDED, describe_failure
from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader

__all__ = ["format_of", "open_checkpoint", "recognise"]

_log = logging.getLogger(__name__)

_KIND = "format"


def recognise(path: Path, kernel: Kernel) -> RegisteredComponent | None:
    """Return the format of the checkpoint at ``path``; None where no installed format recognises it.

    Raises:
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of their plugins.
    """
    if not path.exists():
        return None
    found = [component for component in kernel.registry.all(_KIND) if _recognises(component, path)]
    return kernel.registry.choose(_KIND, str(path), found) if found else None


def format_of(path: Path, kernel: Kernel) -> str | None:
    """Return the name of what :func:`recognise` returns."""
    found = recognise(path, kernel)
    return None if found is None else found.record.name


def open_checkpoint(path: Path, kernel: Kernel, format: str | None = None) -> tuple[str, CheckpointReader]:
    """Return the name of the format of the checkpoint at ``path``, and its reader.

    Args:
        path: a directory or file.
        kernel: its plugins bring the formats.
        format: name of the format; None recognises it.

    Raises:
        ForeignFormatUnknown: nothing is there, or nothing that is recognised.
        UnknownComponent: no plugin offers a format of that name.
        NxdtError: its files are missing or damaged.
    """
    if not path.exists():
        raise _unknown(path, kernel, "it does not exist")
    if format is None:
        component = recognise(path, kernel)
        if component is None:
            raise _unknown(path, kernel, "no installed format recognises its files")
        return component.record.name, _loaded(component).open(path)
    component = kernel.registry.get(_KIND, format)
    chosen = _loaded(component)
    if not chosen.recognises(path):
        raise _unknown(path, kernel, f"it is not of the format {format!r}")
    return component.record.name, chosen.open(path)


def _loaded(component: RegisteredComponent) -> CheckpointFormat:
    loaded: CheckpointFormat = component.load_target()()
    return loaded


def _recognises(component: RegisteredComponent, path: Path) -> bool:
    """Whether a format recognises the path. One that fails is skipped with a warning: the path may be another's."""
    try:
        return _loaded(component).recognises(path)
    except NxdtError as error:
        reason = error.what()
    except GUARDED as error:
        reason = describe_failure(error)
    _log.warning("The checkpoint format %r of %s is skipped: %s", component.record.name, component.dist, reason)
    return False


def _unknown(path: Path, kernel: Kernel, reason: str) -> NxdtError:
    formats = [f"{each.record.name}: {each.record.summary}" for each in kernel.registry.all(_KIND)]
    install, unusable = kernel.registry.not_offered(_KIND)
    return ForeignFormatUnknown(path=str(path), reason=reason, formats=formats, install=install, unusable=unusable)
