"""Defects of NxD Training in loss, optimizer and precision, each by what a user of the YAML would have seen.

``docs/defects.md`` lists all of them, with the tests of those that are held elsewhere.
"""

from __future__ import annotations

import re

import pytest
import torch

from nxdt_core import checkpoint
from nxdt_core.builtins import nxdt_precisions
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config import load
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

LR, DECAY = 0.5, 0.25
ROWS, SEQ = 4, 32
STRATEGY = "distributed_strategy."
PRECISIONS = [name for record in nxdt_precisions() for name in (record.name, *record.aliases)]
SMALL = ("trainer.accelerator=cpu", f"data.seq_length={SEQ}", "data.micro_batch_size=1")


def begun(recipe, *overrides):
    """Engine, model and optimizer of a run, and its configuration."""
    config = load(recipe, [*SMALL, f"data.global_batch_size={ROWS}", *overrides])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    return config, engine, model, initialize_parallel_optimizer(config, engine, model)


def micro_batches(labels=lambda tokens: tokens[:, 1:]):
    tokens = torch.randint(256, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return [Batch(input_ids=row[:, :-1].contiguous(), labels=labels(row).contiguous()) for row in tokens.split(1)]


@pytest.mark.parametrize("decays_norms", [False, True], ids=["norms do not", "norms do"])
@pytest.mark.parametrize("recipe", ["llama-tiny", "gpt-tiny", "mixtral-tiny"])
def test_the_decay_that_is_given_is_the_one_that_shrinks_the_weights(recipe, decays_norms):
    """There: 0.01 whatever was given, and the flag for norms inverted."""
    _, engine, model, optimizer = begun(
        f"recipe:{recipe}",
        "model.num_layers=1",
        f"model.optim={{name: adamw, lr: {LR}, weight_decay: {DECAY}, betas: [0.9, 0.95]}}",
        f"model.do_layer_norm_weight_decay={decays_norms}",
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)  # what moves now, decay moves
    optimizer.step()
    for name, parameter in model.named_parameters():
        vector = parameter.dim() == 1
        kept = vector and (name.endswith("bias") or not decays_norms)
        torch.testing.assert_close(parameter.detach(), before[name] * (1 if kept else 1 - LR * DECAY), msg=name)
    assert any(name.endswith("norm.weight") for name in before)
    engine.shutdown()


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_that_is_offered_trains(name):
    """There: a name of every example file was refused, and the spelling that was taken kept no masters."""
    config, engine, model, optimizer = begun(
        "recipe:llama-tiny",
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.ffn_hidden_size=48",
        "model.optim.lr=1e-2",
        "model.optim.sched.name=constant",
        f"precision.type={name}",
    )
    parts = (build.objective(config), build.schedule(config), TrainState())
    results = [train_step(model, optimizer, micro_batches(), *parts) for _ in range(4)]
    losses = [result.loss.loss for result in results]
    assert losses[-1] < losses[0] - 0.3
    assert {loss.dtype for loss in losses} == {torch.float32}, "what is logged is no sum in bfloat16"
    engine.shutdown()


def test_an_unknown_precision_is_answered_with_names_that_load():
    """There: the message offered what the code refused."""
    with pytest.raises(ConfigError) as caught:
        load("recipe:llama-tiny", ["precision.type=bf17"])
    (problem,) = caught.value.problems
    offered = set(re.findall(r"\w+", str(problem))) & set(PRECISIONS)
    assert offered >= {record.name for record in nxdt_precisions()}
    for name in offered:
        load("recipe:llama-tiny", [f"precision.type={name}"])


def figures(overrides, ignoring):
    """Loss, weight and gradient norm over ranks, where half of the labels are ignored or their rows left out."""
    config, engine, model, optimizer = begun("recipe:llama-tiny", "model.num_layers=2", *overrides)
    if ignoring:
        batches = micro_batches(lambda row: row[:, 1:].clone().fill_(IGNORE_INDEX))[:2] + micro_batches()[2:]
    else:
        batches = micro_batches()[2:]
    loss = model.run_train(batches, build.objective(config))
    norm = optimizer.clip_grad_norm(None)
    engine.shutdown()
    return [float(figure) for figure in (loss.loss, loss.weight, norm)]


@pytest.fixture(scope="module")
def alone():
    """What one process finds where the rows with ignored labels are left out."""
    return figures(["data.global_batch_size=2"], False)


@pytest.mark.parametrize("dimension", ["tensor", "context", "pipeline"])
def test_labels_of_minus_100_push_nothing_in_any_layout(ranks, alone, dimension):
    """There: the vocabulary-parallel loss had no ``ignore_index``, and the mean was over all tokens."""
    layout = [f"{STRATEGY}context_parallel_size=2"]
    if dimension != "context":
        layout = [f"{STRATEGY}{dimension}_model_parallel_size=2"]
    for found in ranks(2).run(figures, ["trainer.devices=2", *layout], True):
        assert found == pytest.approx(alone, rel=1e-5)
        assert found[1] == 2 * SEQ


def test_state_of_all_data_parallel_shards_is_saved(ranks, tmp_path):
    """There: shards were taken for replicas, and of the state of one rank zeros came back."""
    runs = {world: tmp_path / str(world) for world in (1, 2)}
    for world, where in runs.items():
        overrides = [f"trainer.devices={world}", f"checkpoint.uri={where.as_uri()}", f"{STRATEGY}zero1=true"]
        ranks(world).run(save_after_a_step, overrides, world)
    one, two = (saved_state(where) for where in runs.values())
    assert one.keys() == two.keys()
    for name, whole in one.items():
        torch.testing.assert_close(two[name], whole, rtol=1e-4, atol=1e-9, msg=name)
        if name.endswith("exp_avg_sq") and "embed" not in name:
            assert torch.count_nonzero(two[name]) > 0.9 * whole.numel(), name


def save_after_a_step(overrides, world):
    config, engine, model, optimizer = begun("recipe:llama-tiny", "model.num_layers=1", *overrides)
    state, parts = TrainState(), (build.objective(config), build.schedule(config))
    own = ROWS // world
    place = engine.rank_info.dp_rank
    train_step(model, optimizer, micro_batches()[place * own : (place + 1) * own], *parts, state)
    TrainSession(config, engine=engine, model=model, optimizer=optimizer, state=state).save(build.storage(config))
    engine.shutdown()


def saved_state(where):
    storage = LocalStorage(str(where))
    return checkpoint.load_optimizer(storage, checkpoint.latest(storage, warn=print))
