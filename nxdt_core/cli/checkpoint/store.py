"""From the address that a user gives to the store and the steps that it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointStatus
    from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["EXAMPLE_URI", "look"]

EXAMPLE_URI = "nxdt_experiments/llama-tiny/checkpoints"
"""Of a run that the documentation starts; for examples in help texts."""


def look(uri: str) -> tuple[CheckpointStorage, list[CheckpointStatus]]:
    """The store that an address names, and what lies there: all steps, or the one that the address ends with."""
    from nxdt_core.checkpoint import list_checkpoints, locate
    from nxdt_core.kernel import Kernel

    storage, step = locate(uri, Kernel.start())
    return storage, [status for status in list_checkpoints(storage) if step in (None, status.step)]
