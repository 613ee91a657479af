"""The wall clock is set while a run trains: backwards and forwards, by hours, otherwise on each rank."""

from __future__ import annotations

import json

from tests.launch.launching import finish, start, words

JUMPS = """
import time
from nxdt_core.api import Callback, Component, hookimpl

REAL = time.time
HOURS = {2: (-5, 9), 3: (30, -7), 5: (-9, 0)}

class Jumps(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.step in HOURS:
            jump = HOURS[run.step][run.rank] * 3600
            time.time = lambda: REAL() + jump

@hookimpl
def nxdt_callbacks():
    return [Component(name="jumps", target="jumps:Jumps", summary="Sets the clock in a run.")]
"""


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_does_not_care_what_time_it_is(tmp_path, metric_rows):
    (tmp_path / "jumps.py").write_text(JUMPS)
    saving = ("checkpoint.enabled=true", "checkpoint.every_n_train_steps=2", "name=run")
    limits = ("trainer.max_steps=7", "trainer.max_time={hours: 1}", "trainer.devices=2")
    plugin = (f"plugins.local=[{tmp_path / 'jumps.py'}]", "trainer.callbacks=[jumps]")
    status, out, err = finish(start(words(tmp_path, *saving, *limits, *plugin), PYTHONPATH=str(tmp_path)))
    assert status == 0, out + err
    assert "Traceback" not in err
    run_dir = tmp_path / "run"
    found = metric_rows(run_dir)
    assert sorted(found) == [*range(1, 8)]
    timed = ("tokens_per_s", "step_time_s", "data_wait_s", *(f"checkpoint_{name}" for name in ("age_s", "gb_per_s")))
    for row in found.values():
        assert [name for name in timed if row.get(name) is not None and row[name] < 0] == []
    assert any(row.get("checkpoint_age_s") is not None for row in found.values())
    assert all(min(row["seconds"], row["blocked_s"]) >= 0 for row in rows(run_dir / "saves.jsonl"))
    assert max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")) == 7


def test_runs_that_begin_at_the_same_time_have_directories_of_their_own(small_run, tmp_path, monkeypatch):
    """As after a clock was set back: the second run must not write into the directory of the first."""
    from nxdt_core.run import start, train

    class Stopped(start.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 23, 4, 5, 6)

    monkeypatch.setattr(start, "datetime", Stopped)
    keys = ("trainer.max_steps=1", "exp_manager.use_datetime_version=true", "checkpoint.resume_if_exists=false")
    for _ in range(3):
        train(small_run(*keys))
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["2026-11-23_04-05-06", "2026-11-23_04-05-06_2", "2026-11-23_04-05-06_3"]
