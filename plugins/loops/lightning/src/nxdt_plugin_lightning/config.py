"""Keys of an entry ``name: lightning`` in ``exp_manager.loggers``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """A logger of PyTorch Lightning."""

    logger: str
    """Its class in ``pytorch_lightning.loggers``, such as ``CSVLogger``, ``CometLogger`` or ``NeptuneLogger``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class. ``save_dir`` is the run's directory unless it is given."""
