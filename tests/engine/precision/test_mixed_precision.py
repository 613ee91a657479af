"""bfloat16 computing over float32 masters: every layout follows float32 training, and masters are shared out."""

import pytest
import torch

from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step
from tests.sampling import slow_except

STEPS, ROWS, SEQ = 6, 4, 16
FULL = PrecisionPolicy(name="fp32")
MASTERS = PrecisionPolicy(name="masters", parameters="bfloat16", master_weights=True)
AUTOCAST = PrecisionPolicy(name="autocast", autocast="bfloat16")
STRATEGY = "distributed_strategy."
LAYOUTS = {
    "one": (1, 1, ()),
    "dp2": (2, 2, ()),
    "dp2-zero3": (2, 2, (f"{STRATEGY}zero_stage=3",)),
    "dp2-tp2-sp": (4, 2, (f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=true")),
    "dp2-pp2": (4, 2, (f"{STRATEGY}pipeline_model_parallel_size=2",)),
}
"""Ranks, data parallel ranks, overrides."""


def train(policy, world, overrides):
    """Losses by step; dtypes of what the optimizer trains and of its state; elements held of all."""
    config = load(
        "recipe:llama-tiny",
        [
            "trainer.accelerator=cpu",
            f"trainer.devices={world}",
            "model.num_layers=2",
            "model.hidden_size=32",
            "model.ffn_hidden_size=48",
            "model.optim.lr=1e-2",
            f"data.seq_length={SEQ}",
            f"data.global_batch_size={2 * ROWS}",
            "data.micro_batch_size=2",
            *overrides,
        ],
    )
    engine = build.engine(config)
    engine.start()
    adapters = build.adapters(config)
    model = engine.initialize_model(build.model_builder(config), precision=policy, seed=3, adapters=adapters)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    ids = torch.randint(272, (2 * ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    place = engine.rank_info
    rows = 2 * ROWS // place.dp_size
    first = place.dp_rank * rows
    batches = [
        Batch(input_ids=ids[row : row + 2, :-1].contiguous(), labels=ids[row : row + 2, 1:].contiguous())
        for row in range(first, first + rows, 2)
    ]
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    losses = [
        float(train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0).loss.loss)
        for _ in range(STEPS)
    ]
    held = {name: local_of(p).numel() for name, p in model.named_parameters()}
    whole = {name: p.numel() for name, p in model.named_parameters()}
    dtypes = {p.dtype for _, p in model.named_parameters()}
    state_dtypes = {v.dtype for s in optimizer.inner.state.values() for v in s.values() if v.dim()}
    engine.shutdown()
    return losses, dtypes | state_dtypes, sum(held.values()) / sum(whole.values())


@pytest.fixture(scope="module")
def in_float32(ranks):
    ((losses, _, _),) = ranks(1).run(train, FULL, 1, ())
    assert losses[-1] < losses[0] - 0.5
    return losses


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("dp2-zero3",)))
def test_training_over_masters_follows_float32_within_two_percent(ranks, in_float32, layout):
    world, dp, overrides = LAYOUTS[layout]
    for losses, dtypes, share in ranks(world).run(train, MASTERS, world, overrides):
        torch.testing.assert_close(losses, in_float32, rtol=0.02, atol=0)
        assert losses != in_float32, "nothing was computed in bfloat16"
        assert dtypes == {torch.float32}
        assert share <= 1 / dp + 0.01


@pytest.mark.slow  # test_precision.py has a pipeline under autocast
@pytest.mark.parametrize("layout", ["dp2-tp2-sp", "dp2-pp2"])
def test_autocast_follows_float32_within_two_percent(ranks, in_float32, layout):
    world, _, overrides = LAYOUTS[layout]
    for losses, dtypes, _ in ranks(world).run(train, AUTOCAST, world, overrides):
        torch.testing.assert_close(losses, in_float32, rtol=0.02, atol=0)
        assert losses != in_float32
        assert dtypes == {torch.float32}


@pytest.mark.parametrize("layout", slow_except(("dp2", "dp2-zero3", "dp2-tp2-sp", "dp2-pp2"), ("dp2-zero3",)))
def test_frozen_weights_of_products_are_stored_in_bfloat16_under_autocast(ranks, layout):
    adapter = ("adapter.name=lora", "adapter.lora_dropout=0", "adapter.target_modules=[all-linear]")
    ((alone, dtypes, _),) = ranks(1).run(train, AUTOCAST, 1, adapter)
    assert alone[-1] < alone[0] - 0.1
    assert dtypes == {torch.float32, torch.bfloat16}
    world, _, overrides = LAYOUTS[layout]
    for losses, dtypes, _ in ranks(world).run(train, AUTOCAST, world, (*overrides, *adapter)):
        torch.testing.assert_close(losses, alone, rtol=0.01, atol=0)
        assert dtypes == {torch.float32, torch.bfloat16}
