"""The section ``checkpoint.storage`` of the local store. Torch-free."""

from __future__ import annotations

from nxdt_core.config.section import Section

__all__ = ["LocalStorageConfig"]


class LocalStorageConfig(Section):
    """Settings for writing files to a directory."""

    fsync: bool = True
    """Flush files and directories to the disk before a checkpoint counts as committed. Without it a power failure can
    damage the newest checkpoint (which is then detected, and skipped)."""
