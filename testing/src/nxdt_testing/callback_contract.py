"""Tests that every callback and logger must pass; its author subclasses a class once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.callback_contract import CallbackContract, LoggerContract

    class TestMyCallback(CallbackContract):
        entry = {"name": "mine", "every": 2}  # as in trainer.callbacks; the distribution is installed

    class TestMyLogger(LoggerContract):  # of a callback that logs
        entry = {"name": "mine"}  # as in exp_manager.loggers

        def read(self, run_dir):
            return read_my_file(run_dir / "mine.db")  # {step: {metric: value}}

Runs are real ones: four steps of a small model, with a validation and a checkpoint after two.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nxdt_core import checkpoint
from nxdt_core.callback import Callback, uncalled_methods
from nxdt_core.config import ResolvedConfig
from nxdt_testing.contract import difference, no_error
from nxdt_testing.ranks import RankPool, RanksFailed
from nxdt_testing.runs.small_run import STEPS, losses, no_thread_left, small_config, train_small

__all__ = ["CallbackContract", "LoggerContract"]

_HALF = STEPS // 2
_LOSS = "train/loss"
"""Name under which loggers get the loss of a step."""
_CLOSE = 1e-6
"""Allowed difference of a loss that was read, relative: some formats keep float32."""
_whole: dict[str, dict[int, float]] = {}
"""Losses of a run that was not stopped, by its configuration: the tests of a contract share it."""


class _InRuns:
    """Runs with what is tested."""

    entry: ClassVar[str | Mapping[str, Any]]
    """Entry in ``trainer.callbacks`` or ``exp_manager.loggers``: a name, or a mapping of ``name`` and the component's
    keys."""
    plugins: ClassVar[Sequence[str]] = ()
    """Plugin files, for ``plugins.local``."""
    is_logger: ClassVar[bool] = False
    """True if the entry is one of ``exp_manager.loggers``."""

    def _config(self, directory: Path, name: str, **trainer: Any) -> ResolvedConfig:
        callbacks, logged = ({}, {"loggers": [self.entry]}) if self.is_logger else ({"callbacks": [self.entry]}, {})
        return small_config(directory, name, plugins=self.plugins, trainer={**callbacks, **trainer}, exp_manager=logged)

    def _run(self, directory: Path, name: str, **trainer: Any) -> dict[int, float]:
        """Train, and return the losses."""
        return losses(train_small(self._config(directory, name, **trainer)))

    def _build(self, config: ResolvedConfig) -> Callback:
        (selected,) = config.loggers if self.is_logger else config.callbacks
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "config.yaml").write_text("seed: 7\n", encoding="utf-8")
        built: Callback = selected.component.load_target()(selected.config, config.run_dir)
        return built


class CallbackContract(_InRuns):
    """The tests of a callback: subclass it and set :attr:`entry`."""

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
        wrong = difference(self._whole(tmp_path), _plain(tmp_path), "without the callback")
        assert not wrong, f"{wrong}; set changes_training where that is meant"

    def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(self, tmp_path: Path) -> None:
        """Values that the callback counts or averages are in its state, or follow from the step."""
        self._run(tmp_path, "halves", max_steps=_HALF)
        wrong = difference(self._run(tmp_path, "halves"), self._whole(tmp_path), "in a run that was not stopped")
        assert not wrong, f"after a resume {wrong}; keep what it counts in state_dict()"

    def test_its_state_comes_back(self, tmp_path: Path) -> None:
        """Checkpoints hold ``state_dict()`` as it is after some steps, and a new process loads it."""
        other = self._build(self._config(tmp_path, "other"))  # before the run, which seeds what it may draw from
        config = self._config(tmp_path, "halves", max_steps=_HALF)
        with no_error("a run that saves its state raises"):
            train_small(config)
        storage = checkpoint.open_storage(config.checkpoint_uri)
        saved = checkpoint.load_state(storage, checkpoint.read_manifest(storage, _HALF))["extra"]["callbacks"]
        (selected,) = config.callbacks
        state = saved.get(selected.component.qualified_name, {})
        if state:
            other.load_state_dict(copy.deepcopy(state))
        loaded = other.state_dict()
        assert repr(loaded) == repr(state), f"the state {state!r} was saved, and {loaded!r} is there once it is loaded"

    def test_it_leaves_no_thread(self, tmp_path: Path) -> None:
        """A thread that is not a daemon keeps the process from ending."""
        with no_thread_left():
            self._run(tmp_path, "threads", max_steps=1)

    def test_two_ranks_finish(self, tmp_path: Path, pytestconfig: pytest.Config) -> None:
        """Operations that all ranks must do together are not left to the first one alone."""
        if not self.tries_ranks(pytestconfig):
            pytest.skip("this run of pytest leaves ranks out; run all with --samples=all")
        trainer = {"max_steps": _HALF, "devices": 2, "callbacks": [self.entry]}
        try:
            RankPool(2).run(train_on_rank, tmp_path, tuple(self.plugins), trainer, timeout_s=self.hangs_s)
        except RanksFailed as failed:
            pytest.fail(f"on two ranks the run does not end: {failed.summary}")

    def tries_ranks(self, config: pytest.Config) -> bool:
        """Return whether this run of pytest trains on two ranks: unless ``--samples`` asks for less than all."""
        return config.getoption("samples") in (None, "all")

    def _whole(self, directory: Path) -> dict[int, float]:
        return _once(json.dumps([self.entry, *self.plugins]), self._config(directory, "whole"))


class LoggerContract(_InRuns):
    """The tests of a logger: subclass it, set :attr:`entry`, and override :meth:`read`."""

    is_logger = True

    def read(self, run_dir: Path) -> Mapping[int, Mapping[str, float]]:
        """Return what was logged in the runs of this directory: step → metric → value."""
        raise NotImplementedError("override 'read'")

    def test_it_has_the_losses_of_each_step_and_changes_none(self, tmp_path: Path) -> None:
        """Read the losses of a run that was stopped and resumed, by step, and compare with a run without it."""
        with no_thread_left():
            self._run(tmp_path, "halves", max_steps=_HALF)
            run_dir = train_small(self._config(tmp_path, "halves"))
        expected = losses(run_dir)
        wrong = difference(expected, _plain(tmp_path), "without the logger")
        assert not wrong, wrong
        logged = {step: metrics[_LOSS] for step, metrics in self.read(run_dir).items() if _LOSS in metrics}
        missing = sorted(expected.keys() - logged.keys())
        assert not missing, f"it lacks the losses of the steps {missing}; a resumed run adds to what is there"
        wrong = difference(logged, expected, "in the run", rtol=_CLOSE)
        assert not wrong, f"of the losses that were logged {wrong}"

    def test_it_takes_numbers_that_are_not_finite(self, tmp_path: Path) -> None:
        """A run that diverges must say so, and not end in its logger."""
        config = self._config(tmp_path, "nonfinite")
        logger = self._build(config)
        run: Any = SimpleNamespace(step=1, rank=0, config=config, status="failed", error=None, metrics={})
        with no_error("a loss of NaN raises"):
            logger.on_log(run, {"train/loss": math.nan, "train/grad_norm": math.inf})
            logger.on_log(run, {"train/loss": 1.0})
            logger.close(run)


def train_on_rank(directory: Path, plugins: Sequence[str], trainer: Mapping[str, Any]) -> None:
    """Train on one rank of a pool."""
    train_small(small_config(directory, "ranks", plugins=plugins, trainer=trainer))


def _plain(directory: Path) -> dict[int, float]:
    """Losses of a run with neither."""
    return _once("", small_config(directory, "plain"))


def _once(key: str, config: ResolvedConfig) -> dict[int, float]:
    if key not in _whole:
        _whole[key] = losses(train_small(config))
    return _whole[key]
