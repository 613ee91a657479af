"""The section ``checkpoint.storage`` of the FSx store. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from nxdt_core.config.schema import LocalStorageConfig
from nxdt_core.config.section import PositiveInt, Range

_GRAIN_BYTES = 64 * 2**10
"""Lustre takes stripe sizes that are multiples of it, lfs-setstripe(1)."""


class FsxStorageConfig(LocalStorageConfig):
    """Striping of shards over the targets of a Lustre file system, and their export.

    A file grows over its targets: its first bytes are on one, what follows on several, the end of a very large one on
    all. (Many ranks that write a file each keep all targets busy with one target a file; a large file needs several to
    be read fast.)
    """

    stripe: bool = True
    """Lay out the directories of shards; ``false`` leaves the layout to the directory above."""
    stripe_size_bytes: PositiveInt = 4 * 2**20
    """Bytes on one target before the next one's turn."""
    stripe_above_bytes: PositiveInt = 64 * 2**20
    """Bytes of a file on one target, before it is striped."""
    stripe_count: Annotated[int, Range(-1)] = 8
    """Targets of the bytes above that; -1 takes all."""
    stripe_all_above_bytes: PositiveInt = 100 * 2**30
    """Bytes of a file above which all targets are used."""
    archive: bool = False
    """After each commit, ask Lustre to export the checkpoint to the linked S3 repository. (Where the repository has
    automatic export, that does it.)"""
    lfs_timeout_s: Annotated[float, Range(0.001)] = 60.0
    """Longest that one call of ``lfs`` may take."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what Lustre refuses, as (key, message)."""
        if self.stripe_size_bytes % _GRAIN_BYTES:
            yield "stripe_size_bytes", f"{self.stripe_size_bytes} is not a multiple of 64 KiB"
        for key in ("stripe_above_bytes", "stripe_all_above_bytes"):
            if getattr(self, key) % self.stripe_size_bytes:
                yield key, f"{getattr(self, key)} is not a multiple of stripe_size_bytes, {self.stripe_size_bytes}"
        if self.stripe_above_bytes >= self.stripe_all_above_bytes:
            yield "stripe_all_above_bytes", f"it must be greater than stripe_above_bytes, {self.stripe_above_bytes}"
        if self.stripe_count == 0:
            yield "stripe_count", "0 targets hold nothing; -1 takes all"
