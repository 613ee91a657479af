"""A run of some steps from a configuration, as ``nxdt train`` makes it: for contracts of callbacks and loggers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np

from nxdt_core import callback
from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset, SplitName
from nxdt_core.run.training import train
from nxdt_testing.runs.run import run_config

__all__ = ["STEPS", "Tokens", "losses", "no_thread_left", "small_config", "train_small"]

STEPS = 4
"""Steps of a whole run; a checkpoint and a validation are made after half of them."""
_GRACE_S = 2.0
"""Seconds in which a thread that was asked to end may do so."""
_ROWS = 260
"""Vocabulary rows: those of the byte tokenizer, and a spare one."""
_COUNT, _VOCABULARY, _PERIOD = 64, 64, 7
"""Number of samples, size of their vocabulary, and number of samples after which they repeat."""


def small_config(
    directory: Path,
    name: str,
    *,
    plugins: Sequence[str] = (),
    trainer: Mapping[str, Any] | None = None,
    exp_manager: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Return the configuration of a run named ``name`` below ``directory``, with these keys in addition."""
    half, loggers = STEPS // 2, exp_manager or {"create_tensorboard_logger": False}
    return run_config(
        name=name,
        plugins=plugins,
        trainer={"log_every_n_steps": 1, "val_check_interval": half, "limit_val_batches": 1, **(trainer or {})},
        exp_manager={"exp_dir": str(directory), **loggers},
        checkpoint={"resume_if_exists": True, "resume_ignore_no_checkpoint": True, "every_n_train_steps": half},
        data={"name": "contract-tokens", "global_batch_size": 2, "tokenizer": {"library": "byte"}},
        model={
            "vocab_size": _ROWS,
            "num_layers": 1,
            "moe": {"num_experts": 1, "top_k": 1},
            "optim": {"name": "adamw", "lr": 1e-2, "sched": {"name": "constant"}},
        },
    )


def train_small(config: ResolvedConfig) -> Path:
    """Train, and return the run's directory. A callback that the run left out is a failure."""
    with TestCase().assertNoLogs(callback.__name__, logging.WARNING):
        train(config)
    return config.run_dir


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Fail where the block leaves threads that keep a process from ending."""
    before = set(threading.enumerate())
    yield
    left = [
        thread for thread in threading.enumerate() if thread not in before and not thread.daemon and thread.is_alive()
    ]
    for thread in left:
        thread.join(_GRACE_S)
    left = [thread for thread in left if thread.is_alive()]
    assert not left, f"the thread {left[0].name!r} is still running; end it with the run, or make it a daemon"


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, in full."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["loss"] for row in rows}


class Tokens(DatasetSplits):
    """A :class:`~nxdt_core.protocols.dataset.DatasetSplits` of sequences that repeat."""

    def __init__(self, config: object, context: DataContext) -> None:
        self._length = context.seq_length

    def split(self, name: SplitName) -> MapDataset | None:
        """Return the samples of training and validation."""
        return None if name == "test" else _Repeating(self._length, 0 if name == "train" else _COUNT)


class _Repeating(MapDataset):
    def __init__(self, length: int, first: int) -> None:
        self._length, self._first = length, first

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < _COUNT:
            raise IndexError(index)
        tokens = (self._first + index + np.arange(self._length + 1) % _PERIOD) % _VOCABULARY
        return Sample(input_ids=tokens[:-1], labels=tokens[1:])

    def fingerprint(self) -> str:
        return f"repeating from {self._first}"
