"""Errors of ``nxdt config migrate``: codes ``NXDT-C03…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = ["MigrationRefused", "MigrationTargetExists", "MigrationTargetUnwritable", "NoDecoder"]


class MigrationRefused(NxdtError):
    """A file of another framework than the one it was said to be of, or of none that can be told."""

    code = "NXDT-C030"
    happened = "{source} is no file of {wanted}: {reason}."
    remedy = "{advice}"
    source: str
    wanted: str
    reason: str
    advice: str


class MigrationTargetExists(NxdtError):
    """A file that writing would replace."""

    code = "NXDT-C031"
    happened = "{path} exists already."
    remedy = "Name another file, or say --force to replace it."
    path: str


class MigrationTargetUnwritable(NxdtError):
    """A file that cannot be written where it was asked for."""

    code = "NXDT-C032"
    happened = "Cannot write {path}: {reason}."
    remedy = "Name a file in a directory that exists and that you may write to."
    path: str
    reason: str


class NoDecoder(NxdtError):
    """A file of a model that is no decoder, and would be trained as one."""

    code = "NXDT-C033"
    happened = "{source} is of {model} ({found}), and models here are transformer decoders."
    remedy = "Train it where it is from, or begin a decoder from one of 'nxdt recipes list'; the models here: {known}."
    source: str
    model: str
    keys: list[str]
    models: list[str]

    def _view(self) -> dict[str, Any]:
        found = " and ".join(self.keys)
        return {**super()._view(), "found": found, "known": listing(self.models) or "none is installed"}
