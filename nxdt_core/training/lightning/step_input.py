"""What the data module hands to the module for one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nxdt_core.protocols.batch import Batch

__all__ = ["StepInput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What one training step consumes."""

    micro_batches: Sequence[Batch]
    position: dict[str, Any]
    """State of the loader after these, for the checkpoint of this step."""
