"""Errors of ``nxdt config migrate``: codes ``NXDT-C03…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError

__all__ = ["MigrationTargetExists", "MigrationTargetUnwritable", "MigrationUnknown"]


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


class MigrationUnknown(NxdtError):
    """A configuration that no installed migration recognises."""

    code = "NXDT-C034"
    happened = "No installed migration recognises '{source}'.{bad}"
    remedy = "{known}{more}"
    source: str
    installed: tuple[str, ...] = ()
    """``name (program)`` of each installed migration."""
    install: tuple[str, ...] = ()
    """``pip install DIST (names)`` for each known distribution of migrations that is not installed."""
    unusable: tuple[str, ...] = ()
    """One sentence for each installed plugin that cannot be used and might have recognised it."""

    def _view(self) -> dict[str, Any]:
        known = f"Name the migration with --from: {', '.join(self.installed)}." if self.installed else ""
        more = f"Install a migration: {'; '.join(self.install)}." if self.install else ""
        return {
            **super()._view(),
            "bad": f" Installed but unusable: {'; '.join(self.unusable)}." if self.unusable else "",
            "known": known or ("" if more else "No plugin offers any migration."),
            "more": f" {more}" if known and more else more,
        }
