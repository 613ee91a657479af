"""Errors of who may save to a store: codes ``NXDT-S04…``."""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

__all__ = ["OwnershipLost", "StoreInUse"]


class StoreInUse(StorageError):
    """Another run saves to the store."""

    code = "NXDT-S040"
    happened = "{where} belongs to {owner}: {reason}."
    remedy = (
        "Two runs in one place would delete each other's checkpoints: give this one a place of its own (name, or "
        "checkpoint.uri), or stop the other and run the same command again."
    )
    owner: str


class OwnershipLost(StorageError):
    """This run no longer owns the store that it saves to."""

    code = "NXDT-S041"
    happened = "{where} no longer belongs to this run, and nothing more was committed there: {reason}."
    remedy = (
        "What was committed before is intact. Stop whichever run should not be there; the same command then goes on "
        "from the newest checkpoint."
    )
