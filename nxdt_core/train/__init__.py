"""Training as a library: a session for custom training loops, and what it consists of.

The names below are imported on first use, so that a program pays for what it uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.train.session import TrainSession
    from nxdt_core.train.step import (
        initialize_parallel_model,
        initialize_parallel_optimizer,
        start_engine,
        train_step,
    )

__all__ = [
    "TrainSession",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "start_engine",
    "train_step",
]

if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{'session' if name == 'TrainSession' else 'step'}"), name)
