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
        shown = f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
        rate = self.gigabytes_per_s
        speed = f"{rate:.2g} GB/s" if rate >= 1 else f"{1000 * rate:.3g} MB/s"
        return f"{shown} in {self.seconds:.1f} s, {speed}, training waited {self.blocked_s:.2f} s"
