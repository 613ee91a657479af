"""What every callback must keep; its author subclasses this once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.callback_contract import CallbackContract

    class TestMyCallback(CallbackContract):
        entry = {"name": "mine", "every": 2}  # as in trainer.callbacks; the distribution is installed

Runs are real ones: four steps of a small model, with a validation and a checkpoint after two.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nxdt_core.callback import Callback, uncalled_methods
from nxdt_core.checkpoint.write.plan import encode_state
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_testing.ranks import RankPool, RanksFailed
from nxdt_testing.runs.small_run import STEPS, losses, no_thread_left, small_config, train_small

__all__ = ["CallbackContract"]

_HALF = STEPS // 2
_whole: dict[str, dict[int, float]] = {}
"""Losses of a run that was not stopped, by its configuration: the tests of a contract share it."""


class CallbackContract:
    """The tests of a callback: subclass it and set :attr:`entry`."""

    entry: ClassVar[str | Mapping[str, Any]]
    """As in ``trainer.callbacks``: a name, or a mapping of ``name`` and the component's keys."""
    plugins: ClassVar[Sequence[str]] = ()
    """Plugin files, for ``plugins.local``."""
    changes_training: ClassVar[bool] = False
    """True for one that changes weights, gradients or the rate on purpose."""
    hangs_s: ClassVar[float] = 60.0
    """Seconds that two steps on two ranks may take."""

    @pytest.fixture
    def callback(self, tmp_path: Path) -> Callback:
        """Return the callback of one run."""
        return self._build(self._config(tmp_path, "built"))

    def test_it_is_a_callback_whose_methods_are_called(self, callback: Callback) -> None:
        """A run calls the methods of :class:`nxdt_core.api.Callback` by name."""
        assert isinstance(callback, Callback), (
            f"the target returns a {type(callback).__name__}; return an nxdt_core.api.Callback"
        )
        uncalled = uncalled_methods(callback)
        assert not uncalled, f"no run calls {', '.join(uncalled)}; see the methods of nxdt_core.api.Callback"

    def test_a_run_with_it_has_the_losses_of_one_without(self, tmp_path: Path) -> None:
        """It draws no global random numbers, changes no gradient and leaves the model as it finds it."""
        if self.changes_training:
            pytest.skip("it changes training on purpose")
        plain = small_config(tmp_path, "plain", trainer={}, exp_manager={})
        wanted = _once(json.dumps("plain"), plain)
        found = self._whole(tmp_path)
        differing = [step for step in wanted if found.get(step) != wanted[step]]
        assert not differing, (
            f"the loss of step {differing[0]} is {found.get(differing[0])}, and {wanted[differing[0]]} without the "
            "callback; set changes_training where that is meant"
        )

    def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(self, tmp_path: Path) -> None:
        """What it counts or averages is in its state, or follows from the step."""
        wanted = self._whole(tmp_path)
        train_small(self._config(tmp_path, "halves", max_steps=_HALF))
        found = losses(train_small(self._config(tmp_path, "halves")))
        differing = [step for step in wanted if found.get(step) != wanted[step]]
        assert not differing, (
            f"after a resume the loss of step {differing[0]} is {found.get(differing[0])}, and {wanted[differing[0]]} "
            "in a run that was not stopped; keep what it counts in state_dict()"
        )

    def test_its_state_comes_back(self, callback: Callback, tmp_path: Path) -> None:
        """Checkpoints hold ``state_dict()``, and a new process loads it."""
        state = callback.state_dict()
        try:
            encode_state(state, {}, 0)
        except NxdtError as error:
            pytest.fail(f"its state cannot be saved: {error}")
        other = self._build(self._config(tmp_path, "other"))
        other.load_state_dict(copy.deepcopy(state))
        found = other.state_dict()
        assert repr(found) == repr(state), f"the state {state!r} was saved, and {found!r} is there once it is loaded"

    def test_it_leaves_no_thread(self, tmp_path: Path) -> None:
        """A thread that is not a daemon keeps the process from ending."""
        with no_thread_left():
            train_small(self._config(tmp_path, "threads", max_steps=1))

    def test_two_ranks_finish(self, tmp_path: Path, pytestconfig: pytest.Config) -> None:
        """What all ranks must do together is not asked of the first one alone."""
        if not self.tries_ranks(pytestconfig):
            pytest.skip("this run of pytest leaves ranks out; run all with --samples=all")
        trainer = {"max_steps": _HALF, "devices": 2, "callbacks": [self.entry]}
        try:
            RankPool(2).run(train_on_rank, tmp_path, tuple(self.plugins), trainer, timeout_s=self.hangs_s)
        except RanksFailed as failed:
            pytest.fail(f"on two ranks the run does not end: {failed.summary}")

    def tries_ranks(self, config: pytest.Config) -> bool:
        """Return whether this run of pytest trains on two ranks: where it takes all samples, or has no such option."""
        return bool(config.getoption("samples", default="all") == "all")

    def _config(self, directory: Path, name: str, **trainer: Any) -> ResolvedConfig:
        given = {"callbacks": [self.entry], **trainer}
        return small_config(directory, name, plugins=self.plugins, trainer=given, exp_manager={})

    def _whole(self, directory: Path) -> dict[int, float]:
        return _once(json.dumps([self.entry, *self.plugins]), self._config(directory, "whole"))

    @staticmethod
    def _build(config: ResolvedConfig) -> Callback:
        (selected,) = config.callbacks
        config.run_dir.mkdir(parents=True, exist_ok=True)
        built: Callback = selected.component.load_target()(selected.config, config.run_dir)
        return built


def train_on_rank(directory: Path, plugins: Sequence[str], trainer: Mapping[str, Any]) -> None:
    """Train on one rank of a pool."""
    train_small(small_config(directory, "ranks", plugins=plugins, trainer=trainer, exp_manager={}))


def _once(key: str, config: ResolvedConfig) -> dict[int, float]:
    if key not in _whole:
        _whole[key] = losses(train_small(config))
    return _whole[key]
