"""Differences between a resumed run and the one that it resumes, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytorch_lightning as pl

from nxdt_core.checkpoint import CheckpointFacts
from nxdt_core.checkpoint.format.averages import has_average
from nxdt_core.checkpoint.read.difference import compare_trees
from nxdt_core.config import ResolvedConfig
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.weights.saved_config import config_to_save

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["ResumeNotes"]

_OF_THE_RESULT = ("model", "data", "precision", "objective", "adapter", "seed", "trainer.gradient_clip_val")
"""Sections and keys that decide what a run computes. (A layout does not.)"""
_NOTED_ELSEWHERE = ("model.optim.sched.max_steps", "data.num_workers")


class ResumeNotes(pl.Callback):
    """Compares schedule, settings, plugins and average with those of the checkpoint."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Print what differs between this run and the one that wrote the checkpoint."""
        if pl_module.resumed is None:
            return
        before, now = pl_module.resumed_horizon, pl_module.session.horizon.max_steps
        if before != now:
            self._console.say(f"the learning-rate schedule now ends at step {now} instead of {before}")
        for line in _changed_settings(pl_module.resumed.facts, pl_module.config):
            self._console.say(line)
        if changed := _changed_plugins(pl_module.resumed.facts.plugins, pl_module.config.kernel.identities()):
            self._console.say(f"plugins that differ from those of the checkpoint: {', '.join(changed)}")
        averages = pl_module.session.average is not None
        if averages != has_average(pl_module.resumed):
            news = "begins in this run" if averages else "ends here, since exp_manager.ema.enable is false"
            self._console.say(f"the average of the weights {news}")


def _changed_settings(saved: CheckpointFacts, config: ResolvedConfig) -> Iterator[str]:
    """One line for each value that is not that of the checkpoint; keys that only one of them has are left out."""
    for found in compare_trees("config", saved.config, config_to_save(config)):
        counts = any(f"{found.path}.".startswith(f"{path}.") for path in _OF_THE_RESULT)
        if counts and found.only_in is None and found.path not in _NOTED_ELSEWHERE:
            yield f"{found.path} is now {found.values[1]}; the checkpoint was trained with {found.values[0]}"


def _changed_plugins(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of plugins that differ, each with what it is now; none where the checkpoint names no plugin."""
    differ = sorted(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))
    return [f"{name} ({_change(before.get(name), now.get(name))})" for name in differ]


def _change(before: str | None, now: str | None) -> str:
    if before is None or now is None:
        return "new" if before is None else "not installed"
    old, new = (identity.partition(" ")[2].partition(" ")[0] for identity in (before, now))
    return "other code" if old == new else f"{new} instead of {old}"
