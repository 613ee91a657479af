"""Tensors and state into a checkpoint in one call, as a training session saves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nxdt_core.checkpoint import Manifest, Signer, plan_save, save
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["save_checkpoint"]


def save_checkpoint(
    storage: CheckpointStore,
    *,
    ranks: RankAgreement | None = None,
    before_commit: Callable[[], None] | None = None,
    signer: Signer | None = None,
    **parts: Any,
) -> Manifest:
    """Plan and commit a save; ``parts`` are arguments of :func:`nxdt_core.checkpoint.plan_save`."""
    plan = plan_save(storage, **parts, ranks=ranks)
    check = None if before_commit is None else lambda manifest: before_commit()
    return save(storage, plan, ranks=ranks, before_commit=check, signer=signer)
