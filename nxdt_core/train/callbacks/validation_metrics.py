"""What a validation found: of all its data, and of each set where there are several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdt_core.protocols.parallel_model import StepLoss
from nxdt_core.train.data import UNNAMED

__all__ = ["ValidationMetrics", "scalars"]

Metrics = dict[str, float | int | None]


class ValidationMetrics:
    """Adds up losses and metrics on the device, batch by batch.

    Args:
        unit: what the loss is a mean over; of ``tokens`` there is a perplexity, too.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._names: tuple[str, ...] = ()
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, number: int, found: StepLoss) -> None:
        """Add a global batch of the ``number``-th set."""
        self._names = tuple(found.metrics)
        values = torch.stack([found.loss, *(found.metrics[name].to(found.loss) for name in self._names)]).double()
        weight = found.weight.to(values)
        sums = torch.cat([weight.reshape(1), torch.where(weight > 0, values * weight, 0)])
        self._sums[number] = self._sums[number] + sums if number in self._sums else sums

    def row(self, sets: Sequence[str]) -> dict[str, Any]:
        """Means over the unit: of everything and, where ``sets`` have names, of each under ``sets``."""
        if not self._sums:
            return {}
        by_set = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))  # the one copy
        together = self._metrics([sum(column) for column in zip(*by_set.values(), strict=True)])
        if list(sets) == [UNNAMED]:
            return dict(together)
        return {**together, "sets": {sets[number]: self._metrics(sums) for number, sums in by_set.items()}}

    def _metrics(self, sums: Sequence[float]) -> Metrics:
        weight = sums[0]
        loss, *metrics = [value / weight if weight else None for value in sums[1:]]
        found: Metrics = {"loss": loss, self._unit: int(weight)}
        if self._unit == "tokens":
            found["perplexity"] = None if loss is None else math.exp(min(loss, 700.0))  # beyond, there is no such float
        return {**found, **dict(zip(self._names, metrics, strict=True))}


def scalars(row: Mapping[str, Any], unit: str, stage: str = "val") -> dict[str, float | None]:
    """Return the figures of a row under the names that loggers have for them: ``val_loss``, ``val_loss/<set>``, …"""
    found: dict[str, float | None] = {}
    for suffix, figures in (("", row), *((f"/{name}", part) for name, part in row.get("sets", {}).items())):
        named = {key: value for key, value in figures.items() if key not in ("step", "sets", unit)}
        found |= {f"{stage}_{key}{suffix}": value for key, value in named.items()}
    return found
