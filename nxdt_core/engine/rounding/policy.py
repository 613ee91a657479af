"""What a run rounds stochastically, and the keys of its random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nxdt_core.distributed.devices import HOST
from nxdt_core.models.random.rounding import rounding_key
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["StochasticRounding", "masters_rounded", "updates_rounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticRounding:
    """The seed of stochastic rounding, and the dtype of the optimizer's state."""

    seed: int
    state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's state between steps."""

    def keys(self, step: int, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """Return the keys of tensors in one step, int32 [names, KEY_WORDS], in one copy to the device."""
        words = [rounding_key(self.seed, f"rounding\0{step}\0{name}") for name in names]
        return torch.tensor(words, dtype=torch.int32, device=HOST).to(device, non_blocking=True)


def updates_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """Return how a policy rounds what the optimizer makes of the weights; None where it has masters, or rounds to
    nearest."""
    if not policy.stochastic_rounding or policy.master_weights:
        return None
    return StochasticRounding(seed=seed, state="bfloat16" if policy.optimizer_state == "bfloat16" else "float32")


def masters_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """Return how a policy rounds masters to what is computed with; None where it rounds to nearest, or has none."""
    return StochasticRounding(seed=seed) if policy.stochastic_rounding and policy.master_weights else None
