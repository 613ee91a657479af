"""Whole runs: a run that was stopped goes on with the reference of its beginning; a third party's loss is a loss."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest

from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.run.training import train
from tests.distributions import write_distribution
from tests.sampling import slow

HINGE = """
from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_objectives():
    return [Component(name="hinge", target="acme_hinge_loss:Hinge")]
"""
LOSS = '''
import torch

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits


class Hinge(Objective):
    """SLiC's hinge between the two answers' log-probabilities, against nothing."""

    traits = ObjectiveTraits(unit="pairs", rows_per_sample=2)

    def __init__(self, config=None):
        pass

    def weight(self, batch):
        return torch.tensor(float(batch.samples))

    def __call__(self, logits, batch):
        log_probs = (-cross_entropies(logits, batch.labels) * batch.loss_weights).sum(1).view(-1, 2)
        margin = log_probs[:, 0] - log_probs[:, 1]
        return ObjectiveOutput(
            loss_sum=(1 - margin).relu().sum(), weight=self.weight(batch), metrics={"margin": margin.detach().sum()}
        )
'''


@pytest.fixture
def small(tmp_path):
    """``small(objective, *overrides, name=…)``: a run of two layers and narrow ones."""

    def made(*overrides, name="run", objective="dpo"):
        return load(
            f"recipe:llama-tiny-{objective}",
            [
                *(f"exp_manager.exp_dir={tmp_path}", f"name={name}", "trainer.accelerator=cpu"),
                *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48"),
                *("data.global_batch_size=4", "data.micro_batch_size=2", "trainer.max_steps=4"),
                "data.dev_choose_samples=32",  # a reference is computed for each
                *overrides,
            ],
        )

    return made


def rows(config, file="metrics.jsonl"):
    found = [json.loads(line) for line in (config.run_dir / file).read_text().splitlines()]
    return {row["step"]: {key: row.get(key) for key in ("loss", "rewards/margins")} for row in found}


@pytest.mark.parametrize("packing", [slow(()), ("data.packing=true", "data.seq_length=128")], ids=["padded", "packed"])
def test_a_stopped_run_goes_on_with_the_reference_of_its_beginning(small, packing):
    whole = small(*packing, name="whole")
    train(whole)
    first = small(*packing, "trainer.max_steps=2", "model.optim.sched.max_steps=40", name="stopped")
    train(first)
    kept = first.run_dir / "reference"
    shutil.move(kept, kept.with_name("elsewhere"))
    with pytest.raises(NxdtError, match=r"A030.*reference"):
        train(small(*packing, name="stopped"))
    shutil.move(kept.with_name("elsewhere"), kept)
    with pytest.raises(NxdtError, match=r"A030.*these data(.|\n)*Undo changes of the data"):
        train(small(*packing, "data.max_prompt_length=20", "data.truncation_mode=keep_start", name="stopped"))
    train(small(*packing, "data.num_workers=2", name="stopped"))
    assert rows(first) == rows(whole)
    assert set(rows(whole)) == {1, 2, 3, 4}


def test_a_reference_is_kept_for_the_weights_that_it_is_of(small, caplog):
    config = small("trainer.max_steps=1")
    with caplog.at_level("INFO"):
        for seed in (1, 1, 2):
            shutil.rmtree(config.run_dir / "checkpoints", ignore_errors=True)
            caplog.clear()
            train(small("trainer.max_steps=1", f"seed={seed}", "checkpoint.resume_if_exists=false"))
            computed = [record for record in caplog.records if "computing reference" in record.getMessage()]
            assert len(computed) == (0 if seed == 1 and (config.run_dir / "second").exists() else 2)
            (config.run_dir / "second").touch()


@pytest.mark.parametrize("damage", ["byte", slow("count"), slow("cut"), slow("empty")])
def test_a_damaged_reference_is_computed_again_where_its_weights_are_still_there(small, damage, caplog):
    config = small("trainer.max_steps=1")
    train(config)
    files = {path: path.read_bytes() for path in (config.run_dir / "reference").glob("*.npz")}
    assert len(files) == 2
    for path, content in files.items():
        if damage == "count":
            with np.load(path) as kept:
                arrays = dict(kept)
            arrays["counts"][0] += 1
            np.savez(path, **arrays)
        else:
            middle = len(content) // 2
            changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            path.write_bytes({"byte": changed, "cut": content[:100], "empty": b""}[damage])
    with pytest.raises(NxdtError, match=r"A030.*damaged"):
        train(small("trainer.max_steps=2"))
    assert f"{config.run_dir / 'reference'}" in caplog.text
    assert "is damaged" in caplog.text
    shutil.rmtree(config.run_dir / "checkpoints")
    (config.run_dir / "reference" / ".nxdt-0123456789ab.part").write_bytes(b"of a killed run")
    train(config)
    assert {path: path.read_bytes() for path in (config.run_dir / "reference").iterdir()} == files


def test_a_reference_is_not_kept_in_the_directory_that_a_link_leads_to(small, tmp_path):
    config = small("trainer.max_steps=1")
    (tmp_path / "theirs").mkdir()
    config.run_dir.mkdir()
    (config.run_dir / "reference").symlink_to(tmp_path / "theirs")
    with pytest.raises(NxdtError, match=r"T007.*reference: it is a symbolic link, not a directory"):
        train(config)
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_under_an_adapter_the_frozen_base_may_be_the_reference_of_each_step(small, objective):
    small = partial(small, objective=objective)
    precomputed, each_step = (
        small("adapter.name=lora", f"objective.precompute_ref_log_probs={before}", name=f"before-{before}")
        for before in ("true", "false")
    )
    train(precomputed)
    train(each_step)
    assert not (each_step.run_dir / "reference").exists()
    wanted, found = rows(precomputed), rows(each_step)
    assert wanted[4]["rewards/margins"] != 0
    assert found == {step: pytest.approx(row, abs=1e-6) for step, row in wanted.items()}
    without = ("adapter.name=lora", "adapter.enable_lora=false")
    with pytest.raises(NxdtError, match="A032"):
        train(small(*without, "objective.precompute_ref_log_probs=false", name="without"))


def test_the_reference_of_a_run_that_begins_with_an_adapter_is_that_model_or_refused(small):
    lora = ("adapter.name=lora", "adapter.lora_dropout=0", "model.optim.lr=0.05", "model.optim.sched.warmup_steps=0")
    first = small(*lora, name="first")
    train(first)
    loads = ("adapter.load_lora_from_ckpt=true", f"adapter.lora_save_dir={first.checkpoint_uri}")
    begins = (f"checkpoint.resume_from={first.checkpoint_uri}", "checkpoint.weight_init_only=true")
    for name, more in (("loads", loads), ("begins", begins)):
        with pytest.raises(NxdtError, match=r"L009(.|\n)*precompute_ref_log_probs to true"):
            train(small(*lora, *more, "objective.precompute_ref_log_probs=false", name=f"{name}-refused"))
        before = small(*lora, *more, name=name)
        train(before)
        found = rows(before)
        assert found[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert found[1]["rewards/margins"] == pytest.approx(0, abs=1e-6)
        assert abs(found[4]["rewards/margins"]) > 1e-5


def test_the_loss_of_a_third_party_trains_by_its_entry_point(small, tmp_path, monkeypatch):
    files = {"acme_hinge.py": HINGE, "acme_hinge_loss.py": LOSS}
    write_distribution(tmp_path / "site", "acme-hinge", plugins={"hinge": "acme_hinge"}, files=files)
    monkeypatch.syspath_prepend(tmp_path / "site")
    config = load(
        {
            "base": "recipe:llama-tiny",
            "name": "hinge",
            "exp_manager": {"exp_dir": str(tmp_path)},
            "trainer": {"max_steps": 6, "val_check_interval": 6, "limit_val_batches": None, "accelerator": "cpu"},
            "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48},
            "data": {
                "name": "preference",
                "train_files": ["package://nxdt_plugin_preference/data/pairs-train.jsonl"],
                "validation_files": ["package://nxdt_plugin_preference/data/pairs-validation.jsonl"],
                "validation_fraction": 0,
                "seq_length": 64,
                "global_batch_size": 8,
                "dev_choose_samples": 8,  # one batch, which repeats
            },
            "objective": {"name": "hinge"},
        }
    )
    train(config)
    found = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert found[-1]["margin"] > found[0]["margin"]
    (validated,) = (json.loads(line) for line in (config.run_dir / "validation.jsonl").read_text().splitlines())
    assert validated["pairs"] == 8
    assert "perplexity" not in validated
