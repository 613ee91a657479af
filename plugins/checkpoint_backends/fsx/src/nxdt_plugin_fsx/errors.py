"""Warnings about a Lustre file system: codes ``NXDT-S120`` to ``NXDT-S129``.

All are reported as warnings: with each of them, checkpoints are still complete.
"""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

NotLustre = StorageError.define(
    "NXDT-S120",
    "An ``fsx://`` address on another file system.",
    "{where} is not on a Lustre file system: {reason}.",
    "Checkpoints are saved there all the same, as in any directory; see that the file system is mounted on every "
    "node ('mount -t lustre' lists them), or write checkpoint.uri as a plain path.",
)

LfsMissing = StorageError.define(
    "NXDT-S121",
    "A Lustre file system without its command.",
    "{where} is on Lustre, and its shards are neither striped nor exported: {reason}.",
    "Install the Lustre client's tools on the nodes, or set checkpoint.storage.stripe=false.",
)


class LfsFailed(StorageError):
    """One call of ``lfs`` that did not work."""

    code = "NXDT-S122"
    happened = "'{where}' failed: {reason}."
    remedy = "Try it by hand on this node."


StripingFailed = StorageError.define(
    "NXDT-S123",
    "A directory keeps the layout of the one above it.",
    "The shards of {where} are not striped as configured: {reason}.",
    "They are whole, and may be slower to write and read; ask lfs on this node what its file system takes, change "
    "checkpoint.storage.stripe_*, or set checkpoint.storage.stripe=false.",
)

ArchivingFailed = StorageError.define(
    "NXDT-S124",
    "A committed checkpoint that is not exported.",
    "{where} is committed, and not exported to the linked repository: {reason}.",
    "Repeat it by hand, as root where Lustre asks for that: {command}",
)
