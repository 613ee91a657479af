"""What a save cost the run: seconds that training waited, bytes, throughput. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.checkpoint.format.manifest import Manifest

__all__ = ["SaveReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Duration and size of one committed checkpoint."""

    manifest: Manifest
    blocked_s: float
    """Seconds that training waited for it on this rank: for an earlier save, for the other ranks, for the copy to the
    host, and for its end where something waited for that."""
    seconds: float
    """From the call that began it until it was durable on all ranks."""
    captured_at: float
    """When the run was as it holds it, in seconds since the epoch."""

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of the whole checkpoint by the time that it took, in 10⁹ bytes per second."""
        return self.manifest.size_bytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        size = self.manifest.size_bytes
        speed = f"{_shown(size / max(self.seconds, 1e-9))}/s"
        return f"{_shown(size)} in {self.seconds:.1f} s, {speed}, training waited {self.blocked_s:.2f} s"


def _shown(size_bytes: float) -> str:
    gib, mib = size_bytes / 2**30, size_bytes / 2**20
    return f"{gib:.3g} GiB" if gib >= 1 else f"{mib:.3g} MiB"
