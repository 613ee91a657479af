"""What every callback that logs must keep; its author subclasses this once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.logger_contract import LoggerContract

    class TestMyLogger(LoggerContract):
        entry = {"name": "mine"}  # as in exp_manager.loggers; the distribution is installed

        def read(self, run_dir):
            return read_my_file(run_dir / "mine.db")  # {step: {metric: value}}

Runs are real ones: four steps of a small model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nxdt_core.callback import Callback
from nxdt_core.config import ResolvedConfig
from nxdt_testing.runs.small_run import STEPS, losses, no_thread_left, small_config, train_small

__all__ = ["LoggerContract"]

_HALF = STEPS // 2
_LOSS = "train/loss"
"""Name under which loggers get the loss of a step."""
_CLOSE = 1e-6
"""Allowed difference of a loss that was read, relative: some formats keep float32."""


class LoggerContract:
    """The tests of a logger: subclass it, set :attr:`entry`, and override :meth:`read`."""

    entry: ClassVar[str | Mapping[str, Any]]
    """As in ``exp_manager.loggers``: a name, or a mapping of ``name`` and the component's keys."""
    plugins: ClassVar[Sequence[str]] = ()
    """Plugin files, for ``plugins.local``."""

    def read(self, run_dir: Path) -> Mapping[int, Mapping[str, float]]:
        """Return what was logged in the runs of this directory: step → metric → value."""
        raise NotImplementedError("override 'read'")

    def test_it_has_the_losses_of_each_step_and_changes_none(self, tmp_path: Path) -> None:
        """Read the losses of a run that was stopped and resumed, by step, and compare with a run without it."""
        with no_thread_left():
            train_small(self._config(tmp_path, "halves", max_steps=_HALF))
            run_dir = train_small(self._config(tmp_path, "halves"))
        plain = losses(train_small(small_config(tmp_path, "plain", trainer={}, exp_manager={})))
        own = losses(run_dir)
        assert own == plain, f"the losses of a run with the logger are {own}, and {plain} without it"
        found = {step: metrics[_LOSS] for step, metrics in self.read(run_dir).items() if _LOSS in metrics}
        missing = sorted(own.keys() - found.keys())
        assert not missing, (
            f"of the steps {sorted(own)} it has the losses of {sorted(found)}; a resumed run adds to what is there"
        )
        for step, loss in own.items():
            close = math.isclose(found[step], loss, rel_tol=_CLOSE)
            assert close, f"it has the loss {found[step]} of step {step}, and the run says {loss}"

    def test_it_takes_numbers_that_are_not_finite(self, tmp_path: Path) -> None:
        """A run that diverges must say so, and not end in its logger."""
        config = self._config(tmp_path, "nonfinite")
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "config.yaml").write_text("seed: 7\n", encoding="utf-8")
        (selected,) = config.loggers
        logger: Callback = selected.component.load_target()(selected.config, config.run_dir)
        run: Any = SimpleNamespace(step=1, rank=0, config=config, status="failed", error=None, metrics={})
        try:
            logger.on_log(run, {"train/loss": math.nan, "train/grad_norm": math.inf})
            logger.on_log(run, {"train/loss": 1.0})
            logger.close(run)
        except Exception as error:
            pytest.fail(f"a loss of NaN raises {type(error).__name__}: {error}")

    def _config(self, directory: Path, name: str, **trainer: Any) -> ResolvedConfig:
        return small_config(
            directory, name, plugins=self.plugins, trainer=trainer, exp_manager={"loggers": [self.entry]}
        )
