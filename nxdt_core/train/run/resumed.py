"""Differences between a resumed run and the one that it resumes, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nxdt_core.checkpoint import CheckpointFacts
from nxdt_core.checkpoint.format.state_tree import compare_trees
from nxdt_core.config import ResolvedConfig
from nxdt_core.train.session import TrainSession
from nxdt_core.train.weights.average import has_average
from nxdt_core.train.weights.saved_config import config_to_save

__all__ = ["resume_notes"]

_OF_THE_RESULT = ("model", "data", "precision", "objective", "adapter", "seed", "trainer.gradient_clip_val")
"""Sections and keys that decide what a run computes. (A layout does not.)"""
_NOTED_ELSEWHERE = ("model.optim.sched.max_steps", "data.num_workers")


def resume_notes(session: TrainSession, horizon: int) -> Iterator[str]:
    """Yield a line for each difference in schedule, settings, plugins and average.

    Args:
        session: resumed.
        horizon: last step of the schedule that the resumed run was trained with.
    """
    assert session.resumed is not None
    facts, now = session.resumed.facts, session.horizon.max_steps
    if horizon != now:
        yield f"the learning-rate schedule now ends at step {now} instead of {horizon}"
    yield from _changed_settings(facts, session.config)
    if changed := _changed_plugins(facts.plugins, session.config.kernel.identities()):
        yield f"plugins that differ from those of the checkpoint: {', '.join(changed)}"
    averages = session.average is not None
    if averages != has_average(session.resumed):
        news = "begins in this run" if averages else "ends here, since exp_manager.ema.enable is false"
        yield f"the average of the weights {news}"


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
