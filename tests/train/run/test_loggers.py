"""Weights & Biases and MLflow with their own packages, without a network: what they wrote is read back."""

import csv
import re
import shutil
import struct
import sys
import time

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.errors.training import LoggerCannotStart, LoggerLibraryMissing
from nxdt_core.run import train
from tests.sampling import slow
from tests.train.ema_run import averaged_run

WANDB = ("exp_manager.create_wandb_logger=true", "exp_manager.create_tensorboard_logger=false")
BLOCK, FULL, LAST = 32768, 1, 4
MLFLOW = ("exp_manager.create_mlflow_logger=true", "exp_manager.create_tensorboard_logger=false")


def wandb_records(path, deadline_s=60):
    """Every record of a run's file; its writer is a process of its own, and may be behind."""
    end = time.monotonic() + deadline_s
    while not (records := list(scanned_file(path))) or not records[-1].HasField("exit"):
        assert time.monotonic() < end, f"the run's file is not complete: {len(records)} records"
        time.sleep(0.1)
    return records


def scanned_file(path):
    """The records of a log of LevelDB's form with 7 bytes before it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST) and at <= len(data):
            yield Record.FromString(begun)
            begun = b""


def wandb_history(directory):
    """Metric → step → value, and the record of the run."""
    found, run = {}, None
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    for record in wandb_records(path):
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name, value in row.items():
                found.setdefault(name, {})[int(row["trainer/global_step"])] = value
    return found, run


@pytest.mark.parametrize("offline", ["by key", slow("by variable")])
def test_wandb_has_the_figures_and_the_configuration(small_run, metric_rows, monkeypatch, offline):
    kwargs = "{project: tests, name: small, tags: [a, b], offline: %s}" % str(offline == "by key").lower()  # noqa: UP031
    if offline == "by variable":
        monkeypatch.setenv("WANDB_MODE", "offline")
    config = small_run("trainer.max_steps=3", *WANDB, f"exp_manager.wandb_logger_kwargs={kwargs}")
    train(config)
    history, run = wandb_history(config.run_dir)
    expected = {step: row["loss"] for step, row in metric_rows(config.run_dir).items()}
    assert {step: float(value) for step, value in history["train/loss"].items()} == pytest.approx(expected)
    assert (run.project, run.display_name, list(run.tags)) == ("tests", "small", ["a", "b"])
    written = {item.key: item.value_json for item in run.config.update}
    assert '"max_steps":3' in written["trainer"].replace(" ", "")


def test_two_trainings_of_a_process_are_two_wandb_runs(small_run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("first", "second"):
        config = small_run("trainer.max_steps=1", *WANDB, name=name)
        train(config)
        history, run = wandb_history(config.run_dir)
        assert run.display_name == name
        assert list(history["train/loss"]) == [1]


@pytest.mark.slow  # that of wandb shows what loggers are given
@pytest.mark.parametrize("store", ["the run's own", "by variable"])
def test_mlflow_has_the_figures_and_the_configuration(small_run, metric_rows, tmp_path, monkeypatch, store):
    from mlflow.tracking import MlflowClient

    kwargs = "{experiment_name: tests, run_name: small, tags: {of: x}}"
    config = small_run("trainer.max_steps=3", *MLFLOW, f"exp_manager.mlflow_logger_kwargs={kwargs}")
    path = config.run_dir / "mlflow.db"
    if store == "by variable":
        path = tmp_path / "all.db"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
        monkeypatch.chdir(tmp_path)  # where such a store keeps artifacts
    train(config)
    client = MlflowClient(f"sqlite:///{path}")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["of"]) == ("small", "FINISHED", "x")
    found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == pytest.approx({step: row["loss"] for step, row in metric_rows(config.run_dir).items()})
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


@pytest.mark.slow
def test_two_trainings_of_a_process_are_in_their_own_mlflow_stores(small_run):
    from mlflow.tracking import MlflowClient

    for name in ("first", "second"):
        config = small_run("trainer.max_steps=1", *MLFLOW, name=name)
        train(config)
        client = MlflowClient(f"sqlite:///{config.run_dir}/mlflow.db")
        (run,) = client.search_runs([client.get_experiment_by_name("lightning_logs").experiment_id])
        assert run.info.run_name == name
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 1


@pytest.mark.parametrize("left", [2, 0])
def test_tensorboard_shows_each_step_once_after_a_resume(small_run, metric_rows, left):
    """From a checkpoint before the last steps, and from step 0 in the same directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    saving = ("checkpoint.every_n_train_steps=2", "checkpoint.save_top_k=-1")
    config = small_run("trainer.max_steps=4", *saving)
    train(config)
    for step in {2, 4} - {left}:
        shutil.rmtree(config.run_dir / "checkpoints" / f"step-{step:08}")
    train(small_run("trainer.max_steps=3", *saving))
    events = EventAccumulator(str(config.run_dir))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert shown == pytest.approx({step: row["loss"] for step, row in metric_rows(config.run_dir).items()})


def test_a_logger_that_cannot_start_is_told_in_words(small_run):
    kwargs = "exp_manager.mlflow_logger_kwargs={tracking_uri: 'nowhere://x'}"
    with raises(LoggerCannotStart, match=r"logger 'mlflow' cannot start: .*nowhere[\s\S]*tracking_uri"):
        train(small_run("trainer.max_steps=1", *MLFLOW, kwargs))


@pytest.mark.parametrize(
    ("logger", "install"),
    [("tensorboard", "tensorboard"), ("wandb", "nxdt-core[wandb]"), ("mlflow", "nxdt-core[mlflow]")],
)
def test_a_missing_package_is_told_with_what_to_install(small_run, monkeypatch, logger, install):
    monkeypatch.setitem(sys.modules, logger, None)
    with raises(LoggerLibraryMissing, match=re.escape(f"Run: pip install '{install}', or switch it off")):
        train(small_run("trainer.max_steps=1", f"exp_manager.create_{logger}_logger=true"))


OF_RANKS = """
import os
from nxdt_core.api import Callback, Component, hookimpl

class OfRanks(Callback):
    def __init__(self, config, run_dir):
        (run_dir / f"built-on-{os.environ['RANK']}").touch()
        self.file = (run_dir / "losses.csv").open("w")

    def on_log(self, run, metrics):
        if "train/loss" in metrics:
            self.file.write(f"{run.rank},{run.step},{metrics['train/loss']}\\n")

    def close(self, run):
        self.file.close()

@hookimpl
def nxdt_callbacks():
    return [Component(name="of-ranks", target=f"{__name__}:OfRanks")]
"""


def test_a_logger_is_built_on_the_first_rank_alone_and_has_its_figures(tmp_path, metric_rows):
    (tmp_path / "of_ranks.py").write_text(OF_RANKS)
    more = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "trainer.max_steps=2")
    plugin = (f"plugins.local=[{tmp_path / 'of_ranks.py'}]", "exp_manager.loggers=[{name: of-ranks}]")
    RankPool(2).run(averaged_run, str(tmp_path), *more, *plugin, timeout_s=120)
    run_dir = tmp_path / "run"
    assert [path.name for path in run_dir.glob("built-on-*")] == ["built-on-0"]
    rows = list(csv.reader((run_dir / "losses.csv").open()))
    assert {rank for rank, _, _ in rows} == {"0"}
    logged = {int(step): float(loss) for _, step, loss in rows}
    assert logged == pytest.approx({step: row["loss"] for step, row in metric_rows(run_dir).items()})


@pytest.mark.slow
def test_only_the_first_rank_logs(tmp_path, metric_rows):
    """With a package that reaches out to a server, as the test before shows it with files."""
    more = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2", "trainer.max_steps=2")
    RankPool(2).run(averaged_run, str(tmp_path), *more, *WANDB, environment={"WANDB_MODE": "offline"}, timeout_s=120)
    history, _ = wandb_history(tmp_path / "run")  # of the one run that there is
    rows = metric_rows(tmp_path / "run")
    assert {step: float(value) for step, value in history["train/loss"].items()} == pytest.approx(
        {step: row["loss"] for step, row in rows.items()}
    )


def test_tensorboard_has_the_fingerprint_of_the_plugins(small_run):
    config = small_run("trainer.max_steps=1", "exp_manager.create_tensorboard_logger=true")
    train(config)
    resumed = small_run("trainer.max_steps=2", "checkpoint.resume_if_exists=true")
    train(resumed)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.run_dir))
    events.Reload()
    texts = events.Tensors("run/plugins/text_summary")
    assert [event.step for event in texts] == [0, 1]
    for event in texts:
        (text,) = event.tensor_proto.string_val
        assert "\n- nxdt-plugin-llama " in text.decode()
