"""What is worth telling of a Lustre file system: codes ``NXDT-S120`` to ``NXDT-S129``.

All are reported as warnings: with each of them, checkpoints are still complete.
"""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

__all__ = ["ArchivingFailed", "LfsFailed", "LfsMissing", "NotLustre", "StripingFailed"]


class NotLustre(StorageError):
    """An ``fsx://`` address on another file system."""

    code = "NXDT-S120"
    happened = "{where} is not on a Lustre file system: {reason}."
    remedy = (
        "Checkpoints are saved there all the same, as in any directory; see that the file system is mounted on every "
        "node ('mount -t lustre' lists them), or write checkpoint.uri as a plain path."
    )


class LfsMissing(StorageError):
    """A Lustre file system without its command."""

    code = "NXDT-S121"
    happened = "{where} is on Lustre, and its shards are neither striped nor exported: {reason}."
    remedy = "Install the Lustre client's tools on the nodes, or set checkpoint.storage.stripe=false."


class LfsFailed(StorageError):
    """One call of ``lfs`` that did not work."""

    code = "NXDT-S122"
    happened = "'{where}' failed: {reason}."
    remedy = "Try it by hand on this node."


class StripingFailed(StorageError):
    """A directory keeps the layout of the one above it."""

    code = "NXDT-S123"
    happened = "The shards of {where} are not striped as configured: {reason}."
    remedy = (
        "They are whole, and may be slower to write and read; ask lfs on this node what its file system takes, change "
        "checkpoint.storage.stripe_*, or set checkpoint.storage.stripe=false."
    )


class ArchivingFailed(StorageError):
    """A committed checkpoint that is not exported."""

    code = "NXDT-S124"
    happened = "{where} is committed, and not exported to the linked repository: {reason}."
    remedy = "Repeat it by hand, as root where Lustre asks for that: {command}"
    command: str
