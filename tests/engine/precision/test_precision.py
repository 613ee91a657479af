"""The configured precisions: near float32 in every layout; rounded alike on all replicas, and after a resume."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.ranks import process_group

from tests.engine.precision.precision_run import place, train
from tests.sampling import sampled, slow, slow_except

STRATEGY = "distributed_strategy."
LAYOUTS = {
    "one": (1, ()),
    "dp2-zero1": (2, (f"{STRATEGY}zero_stage=1",)),
    "dp2-zero3": (2, (f"{STRATEGY}zero_stage=3",)),
    "dp2-zero0": (2, (f"{STRATEGY}zero1=false",)),
    "dp2-zero2": (2, (f"{STRATEGY}zero_stage=2",)),
    "tp2": (2, (f"{STRATEGY}tensor_model_parallel_size=2",)),
    "tp2-sp": (2, (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true")),
    "cp2": (2, (f"{STRATEGY}context_parallel_size=2",)),
    "pp2": (2, (f"{STRATEGY}pipeline_model_parallel_size=2",)),
}
"""Ranks, overrides."""
FAST = ("model.optim.lr=1e-2",)
BF16_SR = ("precision.type=bf16SR", *FAST)
BFLOAT16 = frozenset({torch.bfloat16})
FLOAT32 = frozenset({torch.float32})
PRECISIONS = {
    "mixed_precision": (("precision.type=mixed_precision",), FLOAT32, FLOAT32),
    "mixed_precisionSR": (("precision.type=mixed_precisionSR",), FLOAT32, FLOAT32),
    "autocast": (("precision.type=autocast",), FLOAT32, FLOAT32),
    "bf16SR": (("precision.type=bf16SR",), BFLOAT16, FLOAT32),
    "bf16SR-small": (("precision.type=bf16SR", "precision.optimizer_state=bfloat16"), BFLOAT16, BFLOAT16),
    "manual": (
        ("precision={type: manual, xla_downcast_bf16: true, master_weights: true, fp32_grad_acc: true}",),
        FLOAT32,
        FLOAT32,
    ),
    "manual-sums": (("precision={type: manual, xla_downcast_bf16: true, fp32_grad_acc: true}",), BFLOAT16, BFLOAT16),
    "manual-masters": (("precision={type: manual, xla_downcast_bf16: true, master_weights: true}",), FLOAT32, FLOAT32),
    "manual-bare": (("precision={type: manual, xla_use_bf16: true}",), BFLOAT16, BFLOAT16),
}
"""Overrides; dtypes of what the optimizer trains, and of its state."""
REFUSED = {("manual-sums", layout) for layout in ("dp2-zero2", "dp2-zero3")}
CASES = [(precision, layout) for precision in PRECISIONS for layout in LAYOUTS if (precision, layout) not in REFUSED]
SAMPLE = 2
EACH = [("autocast", "one"), ("autocast", "pp2"), ("bf16SR", "tp2-sp")]
"""What ``make test`` takes; masters are in ``test_mixed_precision.py``."""


def pytest_generate_tests(metafunc):
    if "precision" in metafunc.fixturenames:
        metafunc.parametrize(("precision", "layout"), sampled(metafunc.config, CASES, SAMPLE, default=EACH))


@pytest.fixture(scope="module")
def run(ranks):
    """``run(world, *overrides, steps=…)``: the outcomes of all ranks."""

    def run(world, *overrides, steps=6, **options):
        return ranks(world).run(train_on, [f"trainer.devices={world}", *overrides], steps, options)

    return run


def train_on(overrides, steps, options):
    return train(overrides, steps=steps, **options)


@pytest.fixture(scope="module")
def run_each(ranks):
    """``run_each(world, *runs, steps=…)``: the outcomes of all ranks for each run, of the same processes."""

    def run_each(world, *runs, **options):
        overrides = [[f"trainer.devices={world}", *run] for run in runs]
        return list(zip(*ranks(world).run(train_each, overrides, options), strict=True))

    return run_each


def train_each(runs, options):
    with process_group():
        return [train(overrides, **options) for overrides in runs]


@pytest.fixture(scope="module")
def in_float32(run):
    (found,) = run(1, *FAST)
    assert found.losses[-1] < found.losses[0] - 0.5
    return found.losses


def test_every_layout_follows_float32_within_two_percent(run, in_float32, precision, layout):
    world, overrides = LAYOUTS[layout]
    keys, weights, state = PRECISIONS[precision]
    for found in run(world, *keys, *FAST, *overrides):
        torch.testing.assert_close(found.losses, in_float32, rtol=0.02, atol=0)
        assert found.product_dtypes == BFLOAT16
        assert (found.dtypes, found.state_dtypes) == (weights, state)


def test_replicas_and_shards_of_bfloat16_weights_stay_equal_bit_for_bit(run_each):
    uneven = "model.ffn_hidden_size=49"
    runs = [(*BF16_SR, uneven, f"{STRATEGY}{zero}") for zero in ("zero1=false", "zero_stage=1", "zero_stage=3")]
    first, *others = (found for each in run_each(2, *runs, micro_batch=4, steps=3) for found in each)
    for other in others:
        assert other.losses == first.losses
        for name, weight in first.weights.items():
            assert torch.equal(other.weights[name], weight), name


def test_masters_are_rounded_stochastically_where_they_are_computed_with_and_kept_in_float32(run):
    (nearest,), (rounded,) = (run(1, f"precision.type=mixed_precision{sr}", *FAST, steps=2) for sr in ("", "SR"))
    assert rounded.losses[0] != nearest.losses[0]
    torch.testing.assert_close(rounded.losses, nearest.losses, rtol=0.01, atol=0)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in rounded.weights.values())


def test_a_step_that_changes_nothing_leaves_masters_as_they_were(run_each):
    uneven = ("model.optim.lr=0.0", "model.ffn_hidden_size=49", f"{STRATEGY}zero_stage=1")
    runs = [(f"precision.type={name}", *uneven) for name in ("fp32", "mixed_precisionSR")]
    (full, _), (rounded, _) = run_each(2, *runs, steps=1)
    for name, weight in full.weights.items():
        assert torch.equal(rounded.weights[name], weight), name


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_weights_which_have_no_master_are_not_rounded(run_each, world):
    """An adapter freezes them as ``model.trainable`` does."""
    runs = [(f"precision.type=mixed_precision{sr}", "model.trainable=[layers.1]", *FAST) for sr in ("", "SR")]
    for nearest, rounded in zip(*run_each(world, *runs, steps=2), strict=True):
        torch.testing.assert_close(rounded.losses, nearest.losses, rtol=0.01, atol=0)
        frozen = [name for name in nearest.weights if not name.startswith("layers.1.")]
        assert all(torch.equal(rounded.weights[name], nearest.weights[name]) for name in frozen)


def test_an_update_of_the_head_alone_trains_in_stages_that_reduce_within_a_step(run_each):
    """Other stages have nothing that trains, and the first part of a split backward reaches a part of the update."""
    adapter = "adapter={name: lora, lora_rank: 4, lora_dropout: 0, use_dora: true, target_modules: [lm_head]}"
    sizes = ("model.num_layers=4", f"{STRATEGY}pipeline_model_parallel_size=2")
    same = ("precision.type=mixed_precision", adapter, *sizes, *FAST)
    reducing = [(*same, f"{STRATEGY}zero_stage=2", *more) for more in ((), (f"{STRATEGY}pipeline_schedule=zbv",))]
    expected, *others = run_each(4, same, *reducing, steps=3)
    for found in others:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other.losses, one.losses, rtol=1e-3, atol=0)


def test_masters_are_rounded_alike_in_every_layout(run_each):
    rounded = ("precision.type=mixed_precisionSR", *FAST)
    one, three = run_each(2, *((*rounded, f"{STRATEGY}zero_stage={n}") for n in (1, 3)), steps=1)
    assert {found.losses[0] for found in (*one, *three)} == {one[0].losses[0]}


@pytest.mark.parametrize("state", [slow("float32"), "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path, state):
    overrides = (*BF16_SR, f"precision.optimizer_state={state}", place(tmp_path))
    whole = run(2, *overrides, steps=4, save_at=2)
    resumed = run(2, *overrides, steps=4, resume=True)
    for one, other in zip(whole, resumed, strict=True):
        assert one.state_dtypes == {getattr(torch, state)}
        assert other.losses == one.losses[2:]
        for name, weight in one.weights.items():
            assert torch.equal(other.weights[name], weight), name


OPTIMIZERS = ("adamw_fp32OptState", "sgd", "lion", "adafactor", "muon")


@pytest.mark.parametrize("optimizer", slow_except(OPTIMIZERS, ("adafactor",)))
def test_optimizers_work_over_weights_that_are_rounded(run, optimizer):
    overrides = [f"model.optim.name={optimizer}", "model.optim.lr=1e-3", "precision.type=bf16SR"]
    one, two = run(2, *overrides, f"{STRATEGY}zero_stage=1", steps=3)
    assert one.losses == two.losses
    assert one.losses[-1] < one.losses[0]
    assert one.dtypes == BFLOAT16


@pytest.mark.slow  # PrecisionContract.test_small_updates_are_not_lost
def test_a_small_rate_ends_near_float32_where_plain_bfloat16_stays_behind(run):
    plain = "precision={type: manual, xla_use_bf16: true}"
    short = ("model.optim.lr=3e-4", "model.num_layers=1")
    full, rounded, nearest = (
        run(1, *short, precision, steps=200, micro_batch=8)[0].losses[-1]
        for precision in ("precision.type=fp32", "precision.type=bf16SR", plain)
    )
    assert abs(rounded / full - 1) < 0.01
    assert abs(nearest / full - 1) > 0.03
