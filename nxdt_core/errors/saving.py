"""Errors of saves that go on beside training: codes ``NXDT-S05…``."""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

__all__ = ["SameWeightsSaved", "SaveTookTooLong"]


class SameWeightsSaved(StorageError):
    """What was to be committed holds the weights of an older checkpoint, though the run has changed them since."""

    code = "NXDT-S050"
    happened = "The save {where} was not committed: {reason}."
    remedy = (
        "Something saved old copies of the weights, or nothing trains them: look at grad_norm, and try "
        "checkpoint.async_save=false. Where updates are meant to be so small that rounding undoes them, set "
        "checkpoint.refuse_same_weights=false."
    )


class SaveTookTooLong(StorageError):
    """A store or a rank that hangs, or a store too slow for the deadline."""

    code = "NXDT-S051"
    happened = "The save {where} was not done in time: {reason}."
    remedy = (
        "Checkpoints committed before are intact. See that the store answers on every node, then run the same command "
        "again; checkpoint.deadline_s allows more time."
    )
