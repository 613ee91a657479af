"""DPO and ORPO follow one process in every layout, and each pair meets its own reference wherever it lands."""

from __future__ import annotations

import json
import math

import pytest

from nxdt_core.config import load
from nxdt_core.training.run import train

STRATEGY = "distributed_strategy."
LAYOUTS = {
    "dp2": (),
    "dp2-zero3": (f"{STRATEGY}zero_stage=3",),
    "tp2-sp": (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true"),
    "tp2-chunked": (f"{STRATEGY}tensor_model_parallel_size=2", "model.loss_chunk_tokens=32"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
}
FIGURES = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected")


def figures(exp_dir, devices, overrides):
    """Of four steps of each objective, and of a validation whose last batch is not full."""
    found = {}
    for objective in ("dpo", "orpo"):
        config = load(
            f"recipe:llama-tiny-{objective}",
            [
                *(f"exp_manager.exp_dir={exp_dir}", f"trainer.devices={devices}", "trainer.accelerator=cpu"),
                *("trainer.max_steps=4", "trainer.val_check_interval=4", "checkpoint.enabled=false"),
                *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48"),
                *("data.dev_choose_samples=7", "data.global_batch_size=4", "data.micro_batch_size=1"),
                *overrides,
            ],
        )
        train(config)
        rows = [
            [json.loads(line) for line in (config.run_dir / file).read_text().splitlines()]
            for file in ("metrics.jsonl", "validation.jsonl")
        ]
        found[objective] = [{name: row[name] for name in FIGURES if name in row} for part in rows for row in part]
    return found


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    (found,) = ranks(1).run(figures, tmp_path_factory.mktemp("alone"), 1, ("data.micro_batch_size=4",))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_follows_one_process(ranks, alone, tmp_path, layout):
    found, _ = ranks(2).run(figures, tmp_path, 2, LAYOUTS[layout])
    for objective, rows in alone.items():
        assert len(rows) == 5
        for one, other in zip(rows, found[objective], strict=True):
            assert other == pytest.approx(one, abs=2e-5, rel=2e-5)


def test_before_the_first_step_no_pair_is_preferred_to_its_reference(alone):
    first, *later = alone["dpo"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert later[-2]["rewards/margins"] > 0.01
