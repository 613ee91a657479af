"""``trainer.max_time``: stops at a step boundary with a save, and the next start goes on for as long again."""

import sys

import pytest

from nxdt_core import checkpoint
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.run import train
from nxdt_core.train import build
from tests import processes
from tests.train.small import SMALL


def newest(config):
    return checkpoint.latest(build.storage(config), warn=print)


def test_a_run_stops_saved_when_its_time_is_over_and_the_next_start_goes_on(small_run, capsys, metric_rows):
    limited = small_run("trainer.max_steps=100000", "trainer.max_time=00:00:00:01")
    summary = train(limited)
    assert summary.exit_status == 143
    assert 0 < summary.step < 100000
    assert newest(limited).step == summary.step == max(metric_rows(limited.run_dir))
    assert "trainer.max_time is over: stopping after this step" in capsys.readouterr().err
    again = train(small_run(f"trainer.max_steps={summary.step + 2}", "trainer.max_time={minutes: 1}"))
    assert (again.step, again.exit_status) == (summary.step + 2, 0)


@pytest.mark.slow  # test_launch.py stops ranks
def test_ranks_of_one_command_stop_at_one_step(small_run, tmp_path):
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *SMALL, "name=run"]
    more = (f"exp_manager.exp_dir={tmp_path}", "trainer.devices=2", "trainer.max_steps=100000")
    done = processes.run(
        [*command, *more, "trainer.max_time={seconds: 1}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 143, done.stderr
    assert done.stderr.count("trainer.max_time is over") == 1
    assert "Traceback" not in done.stderr
    step = newest(small_run("trainer.max_steps=100000")).step
    assert f"steps:      {step} of 100000" in done.stdout


@pytest.mark.parametrize("value", ["soon", "00:00:00:00", "{weeks: 1}"])
def test_what_is_no_length_of_time_is_refused(small_run, value):
    with pytest.raises(ConfigError, match=r"trainer\.max_time.*days:hours:minutes:seconds"):
        small_run(f"trainer.max_time={value}")
