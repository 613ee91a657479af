"""Sections of ``model.optim`` for the built-in optimizers. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["AdamWConfig"]


@dataclass(kw_only=True)
class AdamWConfig:
    """AdamW, with torch's defaults except where the older schema had its own."""

    lr: float = field(default=1e-3, metadata={"doc": "Peak learning rate."})
    weight_decay: float = field(default=0.01, metadata={"doc": "Decoupled weight decay of matrices and embeddings."})
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), metadata={"doc": "Decay of the running mean and of the running square."}
    )
    eps: float = field(default=1e-8, metadata={"doc": "Added to the root of the running square."})
    fused: bool | None = field(
        default=None, metadata={"doc": "Use torch's fused kernel; null: wherever the device has one."}
    )
    capturable: bool = field(default=False, metadata={"doc": "Keep the step counter on the device."})

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.lr < 0:
            yield "lr", "must not be negative"
        if self.weight_decay < 0:
            yield "weight_decay", "must not be negative"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield "betas", "each must be at least 0 and below 1"
        if self.eps <= 0:
            yield "eps", "must be positive"
