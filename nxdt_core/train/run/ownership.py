"""A run owns its directory and the place of its checkpoints, from before it writes until it ends. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nxdt_core.checkpoint import open_storage
from nxdt_core.checkpoint.ownership.store_owner import Ownership, own
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.checkpoints import StorageError, StoreInUse
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train.run.files import make_run_dir

__all__ = ["directory_lock", "owned_on_rank_zero"]

_LOCK = ".nxdt-lock-run"
"""Subdirectory of a run's directory with its lock. (The run's directory itself may be the store, which has another.)"""


def directory_lock(run_dir: Path) -> CheckpointStore:
    """Return the store whose owner is the run that may write to ``run_dir``."""
    return open_storage(str(run_dir / _LOCK))


@contextmanager
def owned_on_rank_zero(
    config: ResolvedConfig, storage: CheckpointStore, say: Callable[[str], None], ranks: RankAgreement
) -> Iterator[Ownership | None]:
    """Own the run's directory for a block, and ``storage`` unless the run saves nothing, on the first rank; collective.
    Yields the ownership of ``storage``, None where there is none.

    Raises:
        StoreInUse: on every rank: another run writes to one of them.
        CannotWriteRunDirectory: on every rank.
    """
    held: list[Ownership] = []
    with ExitStack() as stack:

        def take() -> None:
            stack.callback(_own_directory(config, say).release)
            if config.run.checkpoint.enabled:
                held.append(own(storage, run=config.run.name, say=say))
                stack.callback(held[0].release)

        ranks.on_rank_zero(take)
        yield held[0] if held else None


def _own_directory(config: ResolvedConfig, say: Callable[[str], None]) -> Ownership:
    make_run_dir(config)
    if (config.run_dir / _LOCK).is_symlink():  # the root of a store may be one
        raise CannotWriteRunDirectory(path=str(config.run_dir), reason=f"{_LOCK} is a symbolic link")
    try:
        return own(directory_lock(config.run_dir), run=config.run.name, say=say)
    except StoreInUse as error:
        raise StoreInUse(where=str(config.run_dir), owner=error.owner, reason=error.reason) from None
    except StorageError as error:
        reason = f"{os.path.relpath(error.where, config.run_dir)}: {error.reason}"
        raise CannotWriteRunDirectory(path=str(config.run_dir), reason=reason) from error
