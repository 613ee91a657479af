"""Checkpoints: verified, committed by one manifest, read without running anything.

Names are imported when they are first used, so that listing and verifying checkpoints works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.checkpoint.committed import read_manifest
    from nxdt_core.checkpoint.load import (
        load_model,
        load_model_into,
        load_optimizer,
        load_optimizer_like,
        load_state,
        saved_ranks,
    )
    from nxdt_core.checkpoint.manager import CheckpointManager
    from nxdt_core.checkpoint.manifest import CheckpointFacts, Manifest
    from nxdt_core.checkpoint.ownership import Ownership, own, owned
    from nxdt_core.checkpoint.report import SaveReport
    from nxdt_core.checkpoint.retention import Retention, delete_step, prune
    from nxdt_core.checkpoint.save import save_checkpoint
    from nxdt_core.checkpoint.signing import Signer, TrustedKeys
    from nxdt_core.checkpoint.status import CheckpointStatus, find_checkpoint, latest, list_checkpoints, verify
    from nxdt_core.checkpoint.storage import check_writable, locate, open_storage

__all__ = [
    "CheckpointFacts",
    "CheckpointManager",
    "CheckpointStatus",
    "Manifest",
    "Ownership",
    "Retention",
    "SaveReport",
    "Signer",
    "TrustedKeys",
    "check_writable",
    "delete_step",
    "find_checkpoint",
    "latest",
    "list_checkpoints",
    "load_model",
    "load_model_into",
    "load_optimizer",
    "load_optimizer_like",
    "load_state",
    "locate",
    "open_storage",
    "own",
    "owned",
    "prune",
    "read_manifest",
    "save_checkpoint",
    "saved_ranks",
    "verify",
]

_MODULES = {
    "CheckpointFacts": "manifest",
    "CheckpointManager": "manager",
    "CheckpointStatus": "status",
    "Manifest": "manifest",
    "Ownership": "ownership",
    "Retention": "retention",
    "SaveReport": "report",
    "Signer": "signing",
    "TrustedKeys": "signing",
    "check_writable": "storage",
    "delete_step": "retention",
    "find_checkpoint": "status",
    "latest": "status",
    "list_checkpoints": "status",
    "load_model": "load",
    "load_model_into": "load",
    "load_optimizer": "load",
    "load_optimizer_like": "load",
    "load_state": "load",
    "locate": "storage",
    "open_storage": "storage",
    "own": "ownership",
    "owned": "ownership",
    "prune": "retention",
    "read_manifest": "committed",
    "save_checkpoint": "save",
    "saved_ranks": "load",
    "verify": "status",
}


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
