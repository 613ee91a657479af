"""The program that ``nxdt train`` runs: where a run begins, its directory and log, its callbacks, its report.

:func:`train` is imported when it is first used, because it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.run.training import train

__all__ = ["train"]

if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name != "train":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nxdt_core.run import training

        return training.train
