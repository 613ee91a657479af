"""Every built-in logger keeps what nxdt asks of all."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import pytest
from nxdt_testing.callback_contract import LoggerContract

from tests.train.run.test_loggers import wandb_records


class TestTensorBoard(LoggerContract):
    """Event files."""

    entry = "tensorboard"

    def read(self, run_dir):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run_dir))
        events.Reload()
        return {event.step: {"train/loss": event.value} for event in events.Scalars("train/loss")}


@pytest.mark.slow  # the import takes seconds, and tests/train/run/test_loggers.py reads one back
class TestMLflow(LoggerContract):
    """The run's own store; each start is a run there."""

    entry = "mlflow"

    def read(self, run_dir):
        client = pytest.importorskip("mlflow.tracking").MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
        found = defaultdict(dict)
        for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
            for metric in client.get_metric_history(run.info.run_id, "train/loss"):
                found[metric.step]["train/loss"] = metric.value
        return found


@pytest.mark.slow  # the import takes seconds, and tests/train/run/test_loggers.py reads one back
class TestWandb(LoggerContract):
    """Files without a network; each start is a run there."""

    entry: ClassVar = {"name": "wandb", "project": "contract", "offline": True}

    def read(self, run_dir):
        found = defaultdict(dict)
        for file in run_dir.glob("wandb/offline-run-*/run-*.wandb"):
            for record in wandb_records(file):
                if record.HasField("history"):
                    row = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                    found[int(row["trainer/global_step"])].update(
                        {name: float(value) for name, value in row.items() if name == "train/loss"}
                    )
        return found
