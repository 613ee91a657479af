"""``RUN/best`` is the checkpoint that ``checkpoint.monitor`` ranks first, for every reader of checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import CheckpointNotFound, NoBestCheckpoint
from nxdt_core.run.training import train
from nxdt_core.train.generate import Sampling, load_model
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.loading import find_weights
from nxdt_core.train.weights.saved_config import locate

TINY = (
    *("trainer.max_steps=4", "model.num_layers=1", "model.hidden_size=32", "data.seq_length=16"),
    *("checkpoint.every_n_train_steps=1", "trainer.val_check_interval=1", "trainer.limit_val_batches=1"),
)
WORSENING = ("model.optim.sched={name: constant}", "model.optim.lr=0.3")


def written(uri, prompt, tokens):
    """Return what the model at an address writes behind a prompt."""
    model = load_model(uri)
    return "".join(model.writer.pieces(model.prompt(prompt), Sampling(max_new_tokens=tokens)))


@pytest.fixture
def run(tmp_path):
    """``run(name, *overrides)``: the directory of a run of four steps."""

    def trained(name, *overrides):
        given = [f"exp_manager.exp_dir={tmp_path}", f"name={name}", *TINY, *WORSENING, *overrides]
        config = load("recipe:llama-tiny", given)
        train(config)
        return config.run_dir

    return trained


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_step_is_that_of_the_logged_metric(run, mode):
    directory = run("judged", "checkpoint.monitor=val_loss", f"checkpoint.mode={mode}", "checkpoint.save_top_k=-1")
    rows = [json.loads(line) for line in (directory / "validation.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows}
    best = (min if mode == "min" else max)(losses, key=losses.get)
    assert len(losses) == 4
    for address in (directory / "best", directory / "checkpoints" / "best"):
        storage, step = locate(str(address), None)
        assert (storage.uri, step) == (str(directory / "checkpoints"), best)
        assert find_weights(str(address)).step == best


def test_commands_of_checkpoints_show_it(run, capsys):
    def nxdt(*words):
        capsys.readouterr()
        status = main(words)
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    directory = run("shown", "checkpoint.monitor=val_loss", "checkpoint.mode=min", "checkpoint.save_top_k=-1")
    _, best = locate(str(directory / "best"), None)
    (listed,) = json.loads(nxdt("checkpoint", "list", str(directory / "best"), "--json").stdout)
    inspected = json.loads(nxdt("checkpoint", "inspect", str(directory / "best"), "--json").stdout)
    assert listed["step"] == inspected["step"] == best
    assert nxdt("checkpoint", "verify", str(directory / "checkpoints" / "best")).returncode == 0
    refused = nxdt("checkpoint", "prune", str(directory / "best"), "--keep-last", "1", "--yes")
    assert (refused.returncode, "names one step" in refused.stderr) == (2, True)
    for address in (directory, directory / "checkpoints"):
        assert len(json.loads(nxdt("checkpoint", "list", str(address), "--json").stdout)) == 4
    (short,) = json.loads(nxdt("checkpoint", "list", str(directory / f"step-{best}"), "--json").stdout)
    assert short == listed
    assert nxdt("checkpoint", "prune", str(directory), "--keep-last", "1", "--yes").stdout.startswith("Keeps step 4.")


def test_it_outlives_retention_and_is_what_is_generated_with_and_exported(run, tmp_path):
    directory = run("kept", "checkpoint.monitor=val_loss", "checkpoint.save_top_k=1")  # the mode of a loss is min
    store = checkpoint.open_storage(str(directory / "checkpoints"))
    kept = [status.step for status in checkpoint.list_checkpoints(store)]
    _, best = locate(str(directory / "best"), None)
    assert kept == sorted({best, 4})
    assert best < 4, "the newest is the best, and hides mistakes"
    step = directory / "checkpoints" / f"step-{best:08}"
    words = [written(str(each), "In the", 6) for each in (directory / "best", step)]
    assert words[0] == words[1]
    for name, source in {"best": directory / "best", "step": step}.items():
        export_hf(str(source), str(tmp_path / name))
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == (
        tmp_path / "step" / "model.safetensors"
    ).read_bytes()


def test_metrics_of_an_earlier_validation_are_not_listed_as_those_of_a_step_that_is_validated(run):
    directory = run("unjudged", "checkpoint.save_top_k=-1", "trainer.val_check_interval=2", "trainer.max_steps=5")
    store = checkpoint.open_storage(str(directory / "checkpoints"))
    found = {status.step: "val_loss" in status.facts.metrics for status in checkpoint.list_checkpoints(store)}
    assert found == {1: False, 2: False, 3: True, 4: False, 5: True}


def test_without_a_metric_it_is_an_error_and_a_store_of_that_name_comes_first(run, tmp_path):
    directory = run("best", "trainer.max_steps=1")
    with raises(NoBestCheckpoint, match="checkpoint.monitor is 'step'"):
        find_weights(str(directory / "best"))
    assert find_weights(str(directory)).step == 1
    with raises(CheckpointNotFound):  # a run starts from the same weights each time
        run("next", f"checkpoint.resume_from={directory / 'best'}", "checkpoint.weight_init_only=true")
    shutil.copytree(directory / "checkpoints", tmp_path / "stores" / "best")
    assert locate(str(tmp_path / "stores" / "best"), None)[0].uri == str(tmp_path / "stores" / "best")
    with raises(CheckpointNotFound):
        find_weights(str(tmp_path / "nothing" / "best"))
