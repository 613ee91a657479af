"""``checkpoint.save_bf16``: a model in bfloat16 for others, float32 weights beside it for an exact resume."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from nxdt_testing.errors import raises
from safetensors.torch import load_file

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointFacts
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import SameWeightsSaved
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.train.weights.export import export_hf
from tests.checkpoint.memory import MemoryStorage
from tests.engine.precision.precision_run import SMALL, place, train
from tests.sampling import slow

STRATEGY = "distributed_strategy."
LAYOUTS = {
    "dp2-zero1": (2, ("model.ffn_hidden_size=49", f"{STRATEGY}zero_stage=1")),
    "tp2-padded": (
        2,
        (
            f"{STRATEGY}tensor_model_parallel_size=2",
            "model.num_attention_heads=3",
            "model.num_kv_heads=3",
            "model.hidden_size=24",
            f"{STRATEGY}pad_heads=true",
        ),
    ),
}
"""Ranks, overrides: parameters cut unevenly, and parameters with zeros that no checkpoint sees."""
ROUNDED = ("checkpoint.save_bf16=true", "model.optim.lr=1e-2")
MASTERS = "checkpoint.use_master_weights_in_ckpt=true"


def train_on(overrides, options):
    return train(overrides, **options)


@pytest.fixture(scope="module")
def run(ranks):
    def run(world, *overrides, **options):
        return ranks(world).run(train_on, [f"trainer.devices={world}", *overrides], options)

    return run


def saved(directory):
    """Sections ``model`` and ``optim`` of the only checkpoint below ``directory``, whole."""
    storage = LocalStorage(str(directory))
    manifest = checkpoint.latest(storage, warn=print)
    return checkpoint.load_model(storage, manifest), checkpoint.load_optimizer(storage, manifest)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [("mixed_precision", "dp2-zero1"), slow("mixed_precisionSR", "tp2-padded"), slow("fp32", "tp2-padded")],
)
def test_a_resume_from_a_model_in_bfloat16_is_the_uninterrupted_run(run, tmp_path, precision, layout):
    world, overrides = LAYOUTS[layout]
    overrides = (f"precision.type={precision}", *ROUNDED, *overrides, place(tmp_path))
    whole = run(world, *overrides, steps=3, save_at=2)
    model, optimizer = saved(tmp_path)
    for name, weight in model.items():
        master = optimizer[f"{name}/{MASTER_WEIGHT}"]
        assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, master.bfloat16()), name
    assert any(not torch.equal(weight.float(), optimizer[f"{name}/{MASTER_WEIGHT}"]) for name, weight in model.items())
    for one, other in zip(whole, run(world, *overrides, steps=3, resume=True), strict=True):
        assert other.losses == one.losses[2:]
        for name, weight in one.weights.items():
            assert torch.equal(other.weights[name], weight), name


def test_masters_go_to_other_layouts_and_the_model_to_runs_that_start_from_it(run, tmp_path):
    overrides = ("precision.type=mixed_precision", *ROUNDED, place(tmp_path))
    run(2, *overrides, f"{STRATEGY}tensor_model_parallel_size=2", steps=1, save_at=1)
    model, optimizer = saved(tmp_path)
    (resumed,) = run(1, *overrides, steps=1, resume=True)
    (begun,) = run(1, "precision.type=fp32", place(tmp_path), steps=1, resume="weights")
    for name, weight in resumed.weights.items():
        assert torch.equal(weight, optimizer[f"{name}/{MASTER_WEIGHT}"]), name
        assert torch.equal(begun.weights[name], model[name].float()), name


def test_an_export_has_the_model_in_bfloat16(run, tmp_path):
    run(1, "precision.type=mixed_precision", *ROUNDED, place(tmp_path / "ours"), steps=1, save_at=1)
    export_hf((tmp_path / "ours").as_uri(), str(tmp_path / "theirs"))
    exported = [load_file(file) for file in Path(tmp_path / "theirs").glob("*.safetensors")]
    assert {weight.dtype for part in exported for weight in part.values()} == {torch.bfloat16}


def test_bfloat16_weights_without_masters_are_saved_as_they_are(run, tmp_path):
    run(1, "precision.type=bf16SR", *ROUNDED, place(tmp_path), steps=1, save_at=1)
    model, optimizer = saved(tmp_path)
    assert {weight.dtype for weight in model.values()} == {torch.bfloat16}
    assert not any(key.endswith(MASTER_WEIGHT) for key in optimizer)


@pytest.mark.parametrize("stale", [False, True])
def test_rounded_weights_may_stay_the_same_while_their_masters_move(stale):
    manager = checkpoint.CheckpointManager(MemoryStorage())

    def save(step, master):
        optimizer = {f"w/{MASTER_WEIGHT}": torch.tensor([master])}
        model = {"w": torch.tensor([1.0]).bfloat16()}
        manager.save(step=step, model=model, optimizer=optimizer, state={}, facts=CheckpointFacts(updates=step))
        manager.wait()

    save(1, 1.0)
    with raises(SameWeightsSaved) if stale else nullcontext():
        save(2, 1.0 if stale else 1.0001)


def test_a_run_that_insists_on_masters_refuses_to_round_them():
    with pytest.raises(ConfigError, match=r"use_master_weights_in_ckpt: .*save_bf16: true wants bfloat16"):
        load("recipe:llama-tiny", [*SMALL, MASTERS, "checkpoint.save_bf16=true"])


@pytest.mark.parametrize(
    ("precision", "kept"),
    [
        ("mixed_precision", True),
        ("autocast", True),
        ("fp32", True),
        ("bf16SR", False),
        ("{type: manual, xla_downcast_bf16: 1, fp32_grad_acc: true}", False),
    ],
)
def test_a_run_that_insists_on_masters_refuses_a_precision_without(precision, kept):
    section = f"precision={precision}" if precision.startswith("{") else f"precision.type={precision}"
    with nullcontext() if kept else pytest.raises(ConfigError, match=r"bfloat16 alone[\s\S]*\[NXDT-T030\]"):
        load("recipe:llama-tiny", [*SMALL, MASTERS, section])
