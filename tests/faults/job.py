"""One run of a training job as far as its checkpoints go: it owns its store, goes on from the newest, and saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager, latest, prune
from nxdt_core.checkpoint.ownership import Ownership, own
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["KEEP", "Job", "joined", "weights"]

KEEP = 2
"""Newest checkpoints that are kept."""
AMPLE_S = 60.0
"""Deadline of a save that nothing holds up."""


def joined() -> Ranks:
    """The ranks of the environment. They are never left: what hangs cannot be, and the pool ends the processes."""
    ranks = Ranks.from_environment()
    ranks.start(HOST, timeout_s=AMPLE_S)
    return ranks


def weights(step: int, world: int, elements: int) -> dict[str, torch.Tensor]:
    """What is saved under ``step``: a tensor that all ranks hold, and one of each rank alone; that of the last has
    ``elements``."""
    sizes = [*[20] * (world - 1), elements]
    stages = {f"stage{rank}": torch.arange(float(size)) + 1000 * step + rank for rank, size in enumerate(sizes)}
    return {"shared": torch.full((5,), float(step)), **stages}


class Job:
    """On each rank of the run.

    Args:
        ranks: joined.
        storage: as this rank sees it.
        elements: of the largest tensor.
        background: whether saves go on beside training.
        deadline_s: of one save.
        mutant: turns the arguments of the manager into wrong ones.
    """

    def __init__(
        self,
        ranks: Ranks,
        storage: CheckpointStore,
        *,
        elements: int,
        background: bool,
        deadline_s: float = AMPLE_S,
        mutant: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.ranks = ranks
        self.elements = elements
        self.ownership: Ownership | None = None
        if ranks.rank == 0:
            inner = getattr(storage, "inner", storage)  # the system's locks are no calls of the protocol
            self.ownership = own(inner, run="faults", say=lambda line: None)
        newest = ranks.on_rank_zero(lambda: latest(storage, warn=lambda line: None))
        self.newest = None if newest is None else newest.step
        arguments = {
            "storage": storage,
            "ranks": ranks,
            "deadline_s": deadline_s,
            "newest": newest,
            "before_commit": None if self.ownership is None else self.ownership.check,
            "after_commit": lambda manifest: prune(storage, KEEP, deep=False),
        }
        self.background = background
        self.manager = CheckpointManager(**mutant(arguments))

    def save(self, step: int) -> Exception | None:
        """Save ``step`` and wait until it is committed; returns what that met."""
        held, rank = weights(step, self.ranks.world_size, self.elements), self.ranks.rank
        mine = {name: held[name] for name in ("shared", f"stage{rank}")}
        try:
            self.manager.save(
                step=step,
                model=mine,
                optimizer={f"stage{rank}/step": torch.tensor(float(step))},
                state={"step": step, "own": torch.tensor([rank])},
                facts=CheckpointFacts(updates=step, fencing=0 if self.ownership is None else self.ownership.fencing),
                asynchronous=self.background,
            )
            self.manager.wait()
        except Exception as error:
            return error
        return None

    def end(self) -> None:
        """As a run does that stops."""
        if self.ownership is not None:
            self.ownership.release()
