"""The primitives alone, without Lightning, do what ``nxdt train`` does."""

import subprocess
import sys

import torch

from nxdt_core import checkpoint
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.training import build, primitives, train
from nxdt_core.training.state import TrainState, capture_rng, restore_rng, seed_all


def loop(config, steps, state=None, *, storage=None):
    """A user's own loop over the primitives."""
    engine = build.engine(config)
    engine.start()
    model = primitives.initialize_parallel_model(config, engine)
    optimizer = primitives.initialize_parallel_optimizer(config, engine, model)
    state = state or TrainState()
    if storage is not None:
        manifest = checkpoint.latest(storage, warn=print)
        primitives.load_checkpoint(storage, manifest, engine=engine, model=model, optimizer=optimizer, state=state)
    loader = build.batches(config, engine, build.dataloader(config, build.tokenizer(config)).split("train"))
    if state.data:
        loader.load_state_dict(state.data)
    objective, schedule = build.objective(config), build.schedule(config)
    losses = []
    for micro_batches in loader:
        result = primitives.train_step(
            model, optimizer, micro_batches, objective, schedule, state, max_norm=config.run.trainer.gradient_clip_val
        )
        state.data = loader.state_dict()
        losses.append(float(result.loss.loss))
        if state.step == steps:
            break
    return engine, model, optimizer, state, losses


def test_a_loop_over_the_primitives_equals_nxdt_train_to_the_bit(small_run, metric_rows, weights):
    config = small_run("trainer.max_steps=6")
    train(config)
    _, model, _, state, losses = loop(config, 6)
    assert losses == [row["loss"] for row in metric_rows(config.run_dir).values()]
    saved = weights(config)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert (state.step, state.consumed_samples) == (6, 48)


def test_a_loop_can_save_and_go_on(small_run):
    config = small_run("trainer.max_steps=6")
    _, whole, _, _, losses = loop(config, 6)
    engine, model, optimizer, state, first = loop(config, 2)
    storage = build.storage(config)
    primitives.save_checkpoint(
        storage, config=config, engine=engine, model=model, optimizer=optimizer, state=state, extra={"mine": [1, 2]}
    )
    _, resumed, _, _, second = loop(config, 6, TrainState(), storage=storage)
    assert first + second == losses
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_a_loop_can_save_while_it_goes_on(small_run):
    config = small_run("trainer.max_steps=6")
    _, whole, _, _, losses = loop(config, 6)
    engine, model, optimizer, state, first = loop(config, 2)
    storage = build.storage(config)
    manager = checkpoint.CheckpointManager(storage, ranks=engine.ranks)
    assert primitives.begin_checkpoint(
        manager, config=config, engine=engine, model=model, optimizer=optimizer, state=state
    )
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.zero_()
    manager.wait()
    _, resumed, _, _, second = loop(config, 6, TrainState(), storage=storage)
    assert first + second == losses
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_evaluate_is_the_mean_over_loss_tokens(small_run):
    config = small_run()
    engine = build.engine(config)
    engine.start()
    model = primitives.initialize_parallel_model(config, engine)
    validation = build.dataloader(config, build.tokenizer(config)).split("validation")
    batches = lambda size: GlobalBatchLoader(  # noqa: E731
        validation, global_batch_size=size, micro_batch_size=2, seed=1, shuffle=False, repeat=False
    )
    objective = build.objective(config)
    small, large = (primitives.evaluate(model, batches(size), objective) for size in (2, 16))
    assert abs(small - large) < 1e-5


def test_random_generators_come_back():
    import random

    import numpy as np

    seed_all(7)
    state = capture_rng(torch.device("cpu"))
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(1)))  # noqa: E731
    first = draw()
    assert draw() != first
    restore_rng(state, torch.device("cpu"))
    assert draw() == first


def test_the_primitives_do_not_import_lightning():
    code = "import sys; sys.modules['pytorch_lightning'] = None; import nxdt_core.training.primitives"
    subprocess.run([sys.executable, "-c", code], check=True)
