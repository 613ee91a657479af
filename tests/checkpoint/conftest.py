"""A small training state with everything in it that a checkpoint has to keep, and a way to save it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.checkpoint import CheckpointFacts, Manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config.schema import LocalStorageConfig
from nxdt_core.protocols.store import CheckpointStore
from tests.checkpoint.poison import builder, little_memory, marker
from tests.checkpoint.saving import save_checkpoint

__all__ = ["builder", "little_memory", "marker", "save", "store"]

Save = Callable[..., Manifest]


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    """A directory. Only ``stores/test_store_local.py`` and the contract of stores need its files flushed to disk."""
    return LocalStorage(str(tmp_path / "checkpoints"), LocalStorageConfig(fsync=False))


@pytest.fixture
def save() -> Save:
    """``save(storage, step)`` saves tensors that are filled with ``step``; keywords replace parts of the state.

    The state of ``random`` is shortened, since its 625 numbers are a third of the work of a save;
    ``test_random_states_go_through_a_checkpoint`` saves all of them.
    """
    version, numbers, _ = random.getstate()
    python = (version, numbers[:9], None)

    def save_step(storage: CheckpointStore, step: int, **changed: Any) -> Manifest:
        parts: dict[str, Any] = {
            "model": {"w": torch.full((4, 3), float(step)), "b": torch.full((3,), step).bfloat16()},
            "optimizer": {"w/exp_avg": torch.full((4, 3), float(step))},
            "state": {"position": step, "rng": {"torch": torch.get_rng_state(), "python": python}},
            "facts": CheckpointFacts(consumed_samples=8 * step, config={"run": {"name": "a"}}),
        }
        return save_checkpoint(storage, step=step, **{**parts, **changed})

    return save_step
