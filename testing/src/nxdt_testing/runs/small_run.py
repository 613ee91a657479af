"""A run of some steps from a configuration, as ``nxdt train`` makes it, for contracts of callbacks and loggers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxdt_core import callback
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import HOST
from nxdt_core.train.run.train import train

__all__ = ["STEPS", "losses", "no_thread_left", "small_config", "train_small"]

STEPS = 4
"""Of a whole run; a checkpoint and a validation are made after half of them."""
_ROOM = Path(__file__).parent
_PLUGINS = (str(_ROOM / "plugin.py"), str(_ROOM / "engine_parts.py"))
_GRACE_S = 2.0
"""In which a thread that was asked to end may do so."""
_ROWS = 260
"""Of the byte tokenizer, and a spare one."""


def small_config(
    directory: Path,
    name: str,
    *,
    plugins: Sequence[str] = (),
    trainer: Mapping[str, Any],
    exp_manager: Mapping[str, Any],
) -> ResolvedConfig:
    """Return the configuration of a run named ``name`` below ``directory``, with these keys in addition."""
    half = STEPS // 2
    run = {
        "name": name,
        "seed": 7,
        "plugins": {"local": [*_PLUGINS, *plugins]},
        "trainer": {
            "max_steps": STEPS,
            "accelerator": HOST.type,
            "log_every_n_steps": 1,
            "val_check_interval": half,
            "limit_val_batches": 1,
            **trainer,
        },
        "exp_manager": {
            "exp_dir": str(directory),
            **({} if "loggers" in exp_manager else {"create_tensorboard_logger": False}),
            **exp_manager,
        },
        "checkpoint": {
            "resume_if_exists": True,
            "resume_ignore_no_checkpoint": True,
            "every_n_train_steps": half,
        },
        "data": {
            "name": "contract-tokens",
            "seq_length": 16,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "tokenizer": {"library": "byte"},
        },
        "model": {
            "name": "engine-contract",
            "vocab_size": _ROWS,
            "num_layers": 1,
            "moe": {"num_experts": 1, "top_k": 1},
            "optim": {"name": "adamw", "lr": 1e-2, "sched": {"name": "constant"}},
        },
        "precision": {"type": "fp32"},
    }
    return load(run)


def train_small(config: ResolvedConfig) -> Path:
    """Train, and return the run's directory. A callback that the run left out is a failure."""
    failed, log = _Messages(), logging.getLogger(callback.__name__)
    log.addHandler(failed)
    try:
        train(config)
    finally:
        log.removeHandler(failed)
    assert not failed.seen, failed.seen[0]
    return config.run_dir


class _Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Fail where the block leaves threads that keep a process from ending."""
    before = set(threading.enumerate())
    yield
    left = [each for each in threading.enumerate() if each not in before and not each.daemon and each.is_alive()]
    for each in left:
        each.join(_GRACE_S)
    left = [each for each in left if each.is_alive()]
    assert not left, f"the thread {left[0].name!r} is still running; end it with the run, or make it a daemon"


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, in full."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["loss"] for row in rows}
