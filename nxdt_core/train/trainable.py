"""Freezes what ``model.trainable`` does not choose; an adapter, so that engines treat it as they treat LoRA."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from nxdt_core.errors.optimizers import TrainableEmpty
from nxdt_core.models.patterns import matches_within
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["Trainable"]


class Trainable(Adapter):
    """An :class:`~nxdt_core.protocols.adapter.Adapter` that adds nothing; ``config`` is ``model.trainable``."""

    def __init__(self, config: Sequence[str]) -> None:
        self._patterns = config

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze the parameters that no pattern matches, in place.

        Raises:
            TrainableEmpty: a pattern matches no parameter, or there is none.
        """
        names = [name for name, _ in module.named_parameters()]
        empty = [pattern for pattern in self._patterns if not any(matches_within(pattern, name) for name in names)]
        if empty or not self._patterns:
            raise TrainableEmpty(patterns=empty, nearest=_nearest(empty, names))
        for name, parameter in module.named_parameters():
            chosen = any(matches_within(pattern, name) for pattern in self._patterns)
            parameter.requires_grad_(parameter.requires_grad and chosen)
        return plan


def _nearest(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return patterns of parameters that are like one of ``patterns``, or all; those of equal layers are one."""
    known = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    close = [each for pattern in patterns for each in difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)]
    return list(dict.fromkeys(close)) or known
