"""Values that are right alone and wrong together; what is not done yet; what has no effect."""

from __future__ import annotations

import pytest

from nxdt_core.config.checks import Checked, find_impossible
from nxdt_core.config.sources import COMMAND_LINE
from nxdt_core.config.tree import Tree

IMPOSSIBLE = {
    "weights from nowhere": (
        {"checkpoint.weight_init_only": True, "checkpoint.resume_from": None},
        "weight_init_only takes the weights of a checkpoint, and checkpoint.resume_from names none.",
    ),
    "recompute": (
        {"model.activations_checkpoint_granularity": "full", "model.activations_checkpoint_recompute": ("MLP",)},
        "whole layers are recomputed under granularity 'full', so naming modules means nothing.",
    ),
    "recompute nothing": (
        {"model.activations_checkpoint_granularity": "selective", "model.activations_checkpoint_recompute": ()},
        "selective recomputes what model.activations_checkpoint_recompute names, and that names nothing.",
    ),
    "zero": (
        {"distributed_strategy.zero_stage": 2, "distributed_strategy.zero1": False},
        "zero_stage 2 shards, and zero1: false says not to.",
    ),
    "a rate that rises": (
        {"model.optim.sched.min_lr": 0.1, "model.optim.lr": 0.01},
        "min_lr 0.1 is above the learning rate 0.01 (model.optim.lr) that falls to it.",
    ),
    "masters in bfloat16": (
        {
            "checkpoint.use_master_weights_in_ckpt": True,
            "checkpoint.save_bf16": True,
        },
        "it wants float32 as the model's weights, and checkpoint.save_bf16: true wants bfloat16.",
    ),
    "state": (
        {"precision.optimizer_state": "bfloat16", "model.optim.name": "adamw_fp32OptState"},
        "it says bfloat16, and model.optim.name: adamw_fp32OptState says float32.",
    ),
    "a name above": (
        {"exp_manager.name": "../x"},
        "the directory '../x' of the run would not be in exp_manager.exp_dir.",
    ),
    "an absolute name": (
        {"exp_manager.name": "/x/y", "exp_manager.explicit_log_dir": None},
        "the directory '/x/y' of the run would not be in exp_manager.exp_dir.",
    ),
    "a version above": (
        {"exp_manager.name": "x", "exp_manager.version": ".."},
        "the directory '..' of the run would not be in exp_manager.exp_dir.",
    ),
    "smoothed losses": (
        {"objective.name": "causal_lm", "objective.label_smoothing": 0.1, "model.loss_chunk_tokens": 64},
        "it smooths logits, and with model.loss_chunk_tokens the head returns losses.",
    ),
    "positions": (
        {"data.seq_length": 128, "model.max_position_embeddings": 64},
        "sequences have 128 tokens, the model has positions for 64 (model.max_position_embeddings).",
    ),
}


@pytest.mark.parametrize("name", ["a", "a/b", "a b", "..a", "."])
def test_a_run_may_be_anywhere_in_the_directory_of_runs(name):
    assert not list(find_impossible(Checked({"exp_manager.name": name}, Tree.of({}, COMMAND_LINE))))


@pytest.mark.parametrize(("values", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_work_is_told_with_its_numbers(values, sentence):
    found = find_impossible(Checked(values, Tree.of({}, COMMAND_LINE)))
    assert [problem.what() for problem in found] == [sentence]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_epochs=3",
        "trainer.limit_train_batches=1",
        "trainer.limit_train_batches=1.0",
        "trainer.overfit_batches=0.0",
        "trainer.fast_dev_run=0",
        "exp_manager.files_to_copy=[]",
        "trainer.max_epochs=null",
    ],
)
def test_what_looks_odd_is_taken(report, good, override):
    assert report(good, override) == []


def test_a_base_on_the_command_line_is_refused(report, good):
    (row,) = report(good, "base=other.yaml")
    assert row == (
        "command line: base: found 'other.yaml' (text); a base is read with the file that names it, and overrides come"
        " later. Allowed: null. [NXDT-C015]"
    )


def test_settings_without_effect_are_accepted_and_noted(load, good):
    config = load(
        good,
        "distributed_strategy.sequence_parallel=true",
        "exp_manager.wandb_logger_kwargs={project: x}",
    )
    assert config.notes == (
        "distributed_strategy.sequence_parallel: no effect, since distributed_strategy.tensor_model_parallel_size is 1",
        "exp_manager.wandb_logger_kwargs: no effect, since exp_manager.create_wandb_logger does not select that logger",
    )


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ["exp_manager.ema.decay=0.9", "exp_manager.ema.start_step=3"],
            ["exp_manager.ema.decay, exp_manager.ema.start_step: no effect, since exp_manager.ema.enable is not set"],
        ),
        (["exp_manager.ema.enable=false", "exp_manager.ema.decay=0.999"], []),
        (
            ["distributed_strategy.zero1=true"],
            ["distributed_strategy.zero1: no effect, since one process has nothing to shard"],
        ),
        (["distributed_strategy.zero1=false"], []),
        (
            ["model.optim.sched={name: CosineAnnealing, warmup_steps: 100}"],
            [
                "model.optim.sched.warmup_steps: the rate only rises, since model.optim.sched.max_steps is 100"
                " and warm-up takes 100 steps"
            ],
        ),
        (
            ["model.optim.sched={name: CosineAnnealing, warmup_steps: 50, max_steps: 40}"],
            [
                "model.optim.sched.warmup_steps: the rate only rises, since model.optim.sched.max_steps is 40"
                " and warm-up takes 50 steps",
                "model.optim.sched.max_steps: the schedule ends at step 40, but the run ends later: "
                "trainer.max_steps is 100; the learning rate then stays at min_lr, 0",
            ],
        ),
        (["model.optim.sched={name: CosineAnnealing, warmup_steps: 99}"], []),
    ],
)
def test_settings_that_another_one_makes_idle_are_noted(load, good, overrides, notes):
    assert list(load(good, *overrides).notes) == notes


@pytest.mark.parametrize(
    ("more", "overrides", "found"),
    [
        ("", [f"model.optim.lr=1{'0' * 400}"], "integers from"),
        ("", ["model.optim.lr=\udcff"], "half a character"),
        ('base: "a\\0b"', [], "null byte"),
        ("base: ~nobody-is-called-so/x", [], "~nobody-is-called-so/x"),
        ("", ["model.model_config=~nobody-is-called-so/x"], "~nobody-is-called-so/x"),
        ("", ['data.train_files=["a\\0b"]'], "data.train_files"),
        ("", [f"data.train_files=[{'a' * 300}]"], "data.train_files"),
        ("", [f"model.model_config={'a' * 300}"], "model.model_config"),
    ],
)
def test_values_at_which_python_raises_are_problems(report, good, more, overrides, found):
    rows = report(f"{good}\n{more}\n", *overrides)
    assert found in "\n".join(rows)
