"""Kinds ``logger`` and ``callback``: stock PyTorch Lightning objects, built from a section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import Logger

__all__ = ["CallbackFactory", "LoggerFactory"]


class LoggerFactory(Protocol):
    """The target of the kind ``logger``; built on the rank that logs."""

    def __call__(self, config: Any, run_dir: Path) -> Logger:
        """Build the logger; ``run_dir`` exists."""
        ...


class CallbackFactory(Protocol):
    """The target of the kind ``callback``; built on every rank."""

    def __call__(self, config: Any, run_dir: Path) -> Callback:
        """Build the callback; ``run_dir`` exists."""
        ...
