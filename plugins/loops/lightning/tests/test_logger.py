"""A logger of Lightning in ``nxdt train``, and the contracts that it and the plugin keep."""

from __future__ import annotations

import csv
from typing import ClassVar

import pytest
from nxdt_testing.callback_contract import LoggerContract
from nxdt_testing.errors import raises

from nxdt_core.errors.training import LoggerCannotStart
from nxdt_core.run import train


class TestCsv(LoggerContract):
    """A directory for each start of the run."""

    entry: ClassVar = {"name": "lightning", "logger": "CSVLogger", "options": {"flush_logs_every_n_steps": 1}}

    def read(self, run_dir):
        rows = [row for path in run_dir.rglob("metrics.csv") for row in csv.DictReader(path.open())]
        return {int(row["step"]): {"train/loss": float(row["train/loss"])} for row in rows if row.get("train/loss")}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: lightning, logger: CsvLogger}", r"'CsvLogger' cannot start: .*\n  .*CSVLogger"),
        ("{name: lightning, logger: CSVLogger, options: {directory: x}}", r"(?s)'CSVLogger' cannot start: .*directory"),
    ],
)
def test_what_cannot_start_is_told_in_words(small_run, entry, message):
    with raises(LoggerCannotStart, match=message):
        train(small_run("trainer.max_steps=1", f"exp_manager.loggers=[{entry}]"))
