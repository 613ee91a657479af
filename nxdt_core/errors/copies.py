"""Errors of copying and deleting checkpoints."""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

__all__ = ["CopyHasOtherCheckpoint", "CopyOntoOtherStep", "NoSoundCheckpoint"]


class CopyHasOtherCheckpoint(StorageError):
    """The step is committed at the destination of a copy, by another save."""

    code = "NXDT-S060"
    happened = "{where} holds another checkpoint of that step: {reason}."
    remedy = "Copy to another address, or delete that step there first. Nothing was changed."


class CopyOntoOtherStep(StorageError):
    """The destination of a copy names a step that is not the copied one."""

    code = "NXDT-S061"
    happened = "{where} is no place for that copy: {reason}."
    remedy = "Name the root of the destination; a checkpoint keeps its step, which is part of its manifest."


class NoSoundCheckpoint(StorageError):
    """None of the checkpoints that pruning would keep verifies."""

    code = "NXDT-S062"
    happened = "Nothing was deleted at {where}: {reason}."
    remedy = "'nxdt checkpoint verify --deep' names the damaged files; restore them from a copy, then prune again."
