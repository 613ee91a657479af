"""A run owns the place of its checkpoints from before it decides where to start until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Ownership
from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["owned_on_rank_zero"]


@contextmanager
def owned_on_rank_zero(
    config: ResolvedConfig, storage: CheckpointStorage, say: Callable[[str], None], ranks: RankAgreement
) -> Iterator[Ownership | None]:
    """Own ``storage`` for a block, on the first rank; collective. None elsewhere, and for a run that saves nothing.

    Raises:
        StoreInUse: on every rank: another run saves there.
    """
    held: list[Ownership] = []
    if config.run.checkpoint.enabled:
        ranks.on_rank_zero(lambda: held.append(checkpoint.own(storage, run=config.run.name, say=say)))
    try:
        yield held[0] if held else None
    finally:
        for ownership in held:
            ownership.release()
