"""Checkpoints: verified, committed by one manifest, read without running anything.

Names are imported when they are first used, so that listing and verifying checkpoints works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.checkpoint.commit import read_manifest
    from nxdt_core.checkpoint.format.manifest import CheckpointFacts, Manifest
    from nxdt_core.checkpoint.ownership import Ownership, own, owned
    from nxdt_core.checkpoint.read.load import (
        iterate_model,
        load_model,
        load_model_into,
        load_optimizer,
        load_optimizer_like,
        load_state,
        saved_ranks,
    )
    from nxdt_core.checkpoint.read.status import find_checkpoint, latest, list_checkpoints, verify
    from nxdt_core.checkpoint.signing import Signer, TrustedKeys
    from nxdt_core.checkpoint.storage import check_writable, locate, open_storage
    from nxdt_core.checkpoint.write.manager import CheckpointManager
    from nxdt_core.checkpoint.write.retention import delete_step, prune
    from nxdt_core.checkpoint.write.save import plan_save, save

__all__ = [
    "CheckpointFacts",
    "CheckpointManager",
    "Manifest",
    "Ownership",
    "Signer",
    "TrustedKeys",
    "check_writable",
    "delete_step",
    "find_checkpoint",
    "iterate_model",
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
    "plan_save",
    "prune",
    "read_manifest",
    "save",
    "saved_ranks",
    "verify",
]

_MODULES = {
    "format.manifest": ("CheckpointFacts", "Manifest"),
    "ownership": ("Ownership", "own", "owned"),
    "commit": ("read_manifest",),
    "read.load": (
        "iterate_model",
        "load_model",
        "load_model_into",
        "load_optimizer",
        "load_optimizer_like",
        "load_state",
        "saved_ranks",
    ),
    "read.status": ("find_checkpoint", "latest", "list_checkpoints", "verify"),
    "signing": ("Signer", "TrustedKeys"),
    "storage": ("check_writable", "locate", "open_storage"),
    "write.manager": ("CheckpointManager",),
    "write.retention": ("delete_step", "prune"),
    "write.save": ("plan_save", "save"),
}


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
