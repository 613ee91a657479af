"""Dropout over ranks: the same elements where ranks hold the same values, others where they do not."""

from functools import cache

import pytest
import torch

from nxdt_core.distributed.placement import local_of
from nxdt_core.models.random.dropout import CausalAttentionWithDropout, Dropout
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import seed_all
from nxdt_core.train.step import initialize_parallel_model
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import configuration

GPT = {
    "name": "gpt",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
    "max_position_embeddings": 26,
    "init_method_std": 0.1,
    "hidden_dropout": 0.5,
    "attention_dropout": 0.5,
    "ffn_dropout": 0.5,
}
OUTSIDE = ("embedding.dropout", "layers.0.attention_dropout", "layers.0.mlp_dropout", "layers.1.mlp_dropout")
INSIDE = ("layers.0.attention.core", "layers.0.mlp.dropout", "layers.1.attention.core")


def watched_step(layout, block_type="pre_ln"):
    """What each dropout gave of ones, and the gradients' local parts, of one micro-batch that all ranks read."""
    config = configuration(layout, "float64", {**GPT, "transformer_block_type": block_type})
    engine = build.engine(config)
    engine.start()
    seed_all(config.run.seed)
    model = initialize_parallel_model(config, engine)
    given = {}

    def watch(part, args, output):
        name = names[part]
        given.setdefault(name, (output == 0) if isinstance(part, Dropout) else output.detach().clone())

    names = {part: name for module in model.local_modules() for name, part in module.named_modules()}
    for part in names:
        if isinstance(part, (Dropout, CausalAttentionWithDropout)):
            part.register_forward_hook(watch)
    ids = torch.arange(3 * 24).view(3, 24) % 61
    batch = Batch(input_ids=ids, labels=ids.roll(-1, 1))
    model.run_train([batch], build.objective(config))
    model.finish_gradients()
    gradients = {name: local_of(parameter.grad).clone() for name, parameter in model.named_parameters()}
    engine.shutdown()
    return given, gradients


@pytest.fixture(scope="module")
def watched(ranks):
    """``watched(layout)``: what two ranks give; each layout runs once."""
    return cache(lambda layout: ranks(2).run(watched_step, layout))


@pytest.mark.parametrize(
    ("layout", "shared"),
    [(Layout(tp=2), OUTSIDE), (Layout(tp=2, sp=True), ()), (Layout(dp=2), ())],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_ranks_drop_the_same_where_they_hold_the_same_and_nowhere_else(watched, layout, shared):
    (one, one_gradients), (other, other_gradients) = watched(layout)
    assert one.keys() == other.keys() >= {*OUTSIDE, *INSIDE}
    for name in (*OUTSIDE, *INSIDE):
        assert torch.equal(one[name], other[name]) is (name in shared), name
    for name in ("norm.weight", "layers.1.mlp.down_proj.bias"):  # whole on both
        assert torch.equal(one_gradients[name], other_gradients[name]) or layout.dp > 1, name


def test_a_block_that_every_rank_computes_whole_drops_the_same_on_all(ranks):
    (one, _), (other, _) = ranks(2).run(watched_step, Layout(tp=2), "normformer")
    assert torch.equal(one["layers.0.mlp.dropout"], other["layers.0.mlp.dropout"])
    assert not torch.equal(one["layers.0.attention.core"], other["layers.0.attention.core"])


def test_no_two_modules_drop_alike(watched):
    (given, _), _ = watched(Layout(tp=2))
    masks = [given[name] for name in OUTSIDE]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_recomputation_drops_the_same(watched):
    plain, again = watched(Layout(tp=2, sp=True)), watched(Layout(tp=2, sp=True, recompute="full"))
    for (_, gradients), (_, recomputed) in zip(plain, again, strict=True):
        assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
