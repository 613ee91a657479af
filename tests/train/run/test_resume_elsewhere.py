"""A run that stops goes on from the command line as if it had not: in another layout, and from another store.

``--samples`` decides which layouts are tried (tests/sampling.py).
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from nxdt_core.checkpoint import load_model, load_optimizer, open_storage, read_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from tests import processes
from tests.s3_server import ENVIRONMENT
from tests.sampling import sampled
from tests.train.small import SMALL

STRATEGY = "distributed_strategy."
BEFORE = ("trainer.devices=4", f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}pipeline_model_parallel_size=2")
AFTER = {
    "dp4": ("trainer.devices=4", "data.micro_batch_size=1"),
    "tp4": ("trainer.devices=4", f"{STRATEGY}tensor_model_parallel_size=4"),
    "one process": (),
}
HALF, WHOLE = 8, 16


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", sampled(metafunc.config, AFTER, 1))


def nxdt(*words, **environment):
    done = processes.run(
        [sys.executable, "-m", "nxdt_core", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(where, steps, *more, **environment):
    nxdt(
        "train",
        "recipe:llama-tiny",
        *SMALL,
        "model.num_attention_heads=4",
        f"exp_manager.exp_dir={where}",
        "name=run",
        f"trainer.max_steps={steps}",
        *more,
        **environment,
    )
    return losses(where)


def losses(where):
    """By step; where a step stands twice, the last counts."""
    lines = (Path(where) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Directory of a run of one process, all steps, with a checkpoint at the half."""
    where = tmp_path_factory.mktemp("uninterrupted")
    train(where, WHOLE, f"checkpoint.every_n_train_steps={HALF}")
    return where


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Directory of the first half in tensor and pipeline parallel."""
    where = tmp_path_factory.mktemp("stopped")
    train(where, HALF, *BEFORE)
    return where


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_curve_goes_on_unbroken_in_another_layout(tmp_path, uninterrupted, stopped, layout):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    resumed = train(tmp_path, WHOLE, *AFTER[layout], "checkpoint.resume_if_exists=true")
    expected = losses(uninterrupted)
    assert sorted(resumed) == sorted(expected) == list(range(1, WHOLE + 1))
    assert all(abs(resumed[step] - expected[step]) < 1e-4 for step in expected)
    assert expected[WHOLE] < expected[HALF] < expected[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_bit_equal_from_s3(tmp_path, uninterrupted, s3_server, s3_uri):
    """Its checkpoint was copied there; one line of the configuration changes."""
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": s3_server.url}
    here = uninterrupted / "run" / "checkpoints"
    nxdt("checkpoint", "copy", f"{here}/step-{HALF:08d}", s3_uri, **environment)
    train(tmp_path, WHOLE, f"checkpoint.uri={s3_uri}", "checkpoint.resume_if_exists=true", **environment)
    nxdt("checkpoint", "copy", f"{s3_uri}/step-{WHOLE:08d}", str(tmp_path / "back"), **environment)
    found, expected = LocalStorage(str(tmp_path / "back")), open_storage(str(here))
    for load in (load_model, load_optimizer):
        ours, theirs = (load(store, read_manifest(store, WHOLE)) for store in (found, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    curve = losses(uninterrupted)
    assert losses(tmp_path) == {step: curve[step] for step in range(HALF + 1, WHOLE + 1)}
