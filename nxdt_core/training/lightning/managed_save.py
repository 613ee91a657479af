"""How a callback asks for a checkpoint through Lightning, which adds the state of its loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from nxdt_core.checkpoint import CheckpointManager
from nxdt_core.training.session import SaveFacts

__all__ = ["ManagedSave"]


@dataclass(slots=True, kw_only=True)
class ManagedSave:
    """Passed as ``trainer.save_checkpoint(…, storage_options=ManagedSave(…))``."""

    manager: CheckpointManager
    """Decides where, and whether in the background."""
    about: SaveFacts = field(default_factory=SaveFacts)
    begun: bool = False
    """Set by the save: False where it was skipped."""
    took_s: float = 0.0
    """Set by the save: seconds until the manager gave control back."""
