"""``nxdt train`` as each rank of a launcher runs it."""

from __future__ import annotations

import os
from pathlib import Path

from nxdt_core.cli import main
from tests.faults import deadly
from tests.train.small import SMALL

__all__ = ["STEPS", "train"]

STEPS = 4


def train(directory: str) -> int:
    """Train from the newest checkpoint on, or afresh where there is none, and save after every step.

    Returns how often this rank called the store.
    """
    words = [
        *SMALL,
        f"exp_manager.exp_dir={directory}",
        "name=run",
        f"trainer.max_steps={STEPS}",
        f"trainer.devices={os.environ['WORLD_SIZE']}",
        f"plugins.local=[{Path(deadly.__file__)}]",
        "checkpoint.uri=deadly://place",
        "checkpoint.every_n_train_steps=1",
        "checkpoint.save_top_k=2",
        "checkpoint.resume_if_exists=true",
        "checkpoint.resume_ignore_no_checkpoint=true",
    ]
    status = main(["train", "recipe:llama-tiny", *words])
    assert not status, f"nxdt train ended with status {status}"
    return sum(store.calls for store in deadly.opened)
