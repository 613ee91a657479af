"""What a rank reads from a dataset at each step, and its position then: for tests of resuming."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

__all__ = ["take_steps"]


def take_steps(
    dataset: MapDataset | IterableDataset,
    count: int,
    *,
    global_batch_size: int,
    micro_batch_size: int = 1,
    seed: int,
    rank: int | None = None,
    size: int | None = None,
    state: dict[str, Any] | None = None,
    workers: int = 0,
) -> tuple[list[list[Batch]], dict[str, Any]]:
    """Shuffle, and read ``count`` steps as data parallel rank ``rank`` of ``size`` from ``state`` on.

    Returns:
        The micro-batches of each step, and the state after them, as a checkpoint would keep it.
    """
    loader = GlobalBatchLoader(
        dataset,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=seed,
        shuffle=True,
        dp_rank=rank,
        dp_size=size,
        num_workers=workers,
    )
    if state is not None:
        loader.load_state_dict(state)
    steps = [list(batches) for batches in islice(loader, count)]
    loader.close()
    return steps, json.loads(json.dumps(loader.state_dict()))
