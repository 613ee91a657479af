"""Heads that the ranks cannot share in equal parts: filled up with zeros that neither training nor checkpoints see."""

import pytest
import torch

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

STEPS = 2
PADDED = (
    "trainer.devices=2",
    "distributed_strategy.tensor_model_parallel_size=2",
    "distributed_strategy.sequence_parallel=true",
    "distributed_strategy.pad_heads=true",
)


def configuration(directory, overrides):
    return load(
        "recipe:llama-tiny",
        [
            "trainer.accelerator=cpu",
            f"exp_manager.exp_dir={directory}",
            "model.num_layers=2",
            "model.hidden_size=24",
            "model.head_dim=8",
            "model.num_attention_heads=3",
            "model.num_kv_heads=3",
            "model.ffn_hidden_size=32",
            "data.seq_length=16",
            "data.global_batch_size=4",
            "data.micro_batch_size=1",
            *overrides,
        ],
    )


def train(directory, overrides, resume):
    """Losses and norms of some steps; saves after them, or continues from what was saved before them."""
    config = configuration(directory, overrides)
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    storage, state = build.storage(config), TrainState()
    if resume:
        manifest = checkpoint.latest(storage, warn=print)
        TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).load_checkpoint(
            storage, manifest
        )
    ids = torch.randint(272, (4, 17), generator=torch.Generator().manual_seed(5))
    place = engine.rank_info
    rows = [row for row in range(4) if row * place.dp_size // 4 == place.dp_rank]
    batches = [Batch(input_ids=ids[row : row + 1, :-1], labels=ids[row : row + 1, 1:]) for row in rows]
    objective, schedule = build.objective(config), build.schedule(config)
    steps = [train_step(model, optimizer, batches, objective, schedule, state, max_norm=1.0) for _ in range(STEPS)]
    if not resume:
        TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).save(storage)
    shapes = {name: tuple(held.shape) for name, held in model.state_dict().items()}
    engine.shutdown()
    return [float(value) for step in steps for value in (step.loss.loss, step.grad_norm)], shapes


@pytest.mark.parametrize(
    "more", [(), ("adapter.name=lora", "adapter.lora_dropout=0", "model.optim.lr=0.03", "model.num_kv_heads=1")]
)
def test_three_heads_on_two_ranks_train_as_on_one_and_their_checkpoints_fit_both(ranks, tmp_path, more):
    one, two = tmp_path / "one", tmp_path / "two"
    ((reference, shapes),) = ranks(1).run(train, one, more, False)
    padded = ranks(2).run(train, two, (*PADDED, *more), False)
    for losses, held in padded:
        torch.testing.assert_close(losses, reference, rtol=0, atol=1e-5)
        assert held == shapes
    ((expected, _),) = ranks(1).run(train, one, more, True)
    assert expected[-2] < expected[0] < reference[-2]
    ((from_padded, _),) = ranks(1).run(train, two, more, True)
    torch.testing.assert_close(from_padded, expected, rtol=0, atol=1e-5)
    for losses, _ in ranks(2).run(train, one, (*PADDED, *more), True):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
