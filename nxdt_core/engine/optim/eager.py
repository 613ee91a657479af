"""Optimizers of ``torch.optim`` without the code that lets ``torch.compile`` trace them.

That code wraps ``step`` and ``add_param_group``, and imports ``torch._dynamo`` when they are called: one CPU-second at
the start of a run. No optimizer is compiled here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import torch

__all__ = ["EagerOptimizer", "eager"]


class EagerOptimizer(torch.optim.Optimizer):
    """A base for optimizers, alone or before a class of ``torch.optim``, whose methods it calls without wrappers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        unwrap(super().add_param_group.__func__)(self, param_group)  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters from their gradients."""
        return unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]


@cache
def eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return the subclass of ``kind``, a class of ``torch.optim``, with the same name and without the wrappers."""
    return type(kind.__name__, (EagerOptimizer, kind), {})
