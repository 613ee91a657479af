"""Errors of ``nxdt config migrate``: codes ``NXDT-C03…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = ["MigrationRefused", "MigrationTargetExists", "MigrationTargetUnwritable"]


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
