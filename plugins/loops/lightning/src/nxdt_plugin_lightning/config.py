"""Keys of an entry ``name: lightning`` in ``exp_manager.loggers``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from nxdt_core.config.section import Section

__all__ = ["LoggerConfig"]


class LoggerConfig(Section):
    """A logger of PyTorch Lightning."""

    logger: str
    """Its class in ``pytorch_lightning.loggers``, such as ``CSVLogger``, ``CometLogger`` or ``NeptuneLogger``."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the class. ``save_dir`` is the run's directory unless it is given."""
