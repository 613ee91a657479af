"""FSDP gathers weights in float8: half the bytes, bitwise the same products, losses and saved weights."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from nxdt_plugin_torchao.product import Float8Cast, Float8Product
from nxdt_testing.ranks import RankPool

from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.estimate.rank import dimensions
from nxdt_core.engine.estimate.trace import WireBytes
from nxdt_core.errors.configuration import ConfigError
from tests.engine.test_traffic import HIDDEN, LAYERS, MICRO_BATCHES, STRATEGY, SUMS, configured, planned, running
from tests.sampling import shortened, slow, slow_except

TENSORWISE = "precision.scaling=tensorwise"
AUTOCAST = "precision.rest=autocast"
WIDE = "precision.all_gather=bfloat16"
LORA = "adapter={name: lora, lora_rank: 4, target_modules: [all-linear]}"
ZERO1, ZERO3 = f"{STRATEGY}zero_stage=1", f"{STRATEGY}zero_stage=3"
TP2 = f"{STRATEGY}tensor_model_parallel_size=2"
PP2 = f"{STRATEGY}pipeline_model_parallel_size=2"
WEIGHTS = 7 * LAYERS
"""Matrices that float8 products read."""
ELEMENTS = LAYERS * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * 64)
STEPS = 20
LAYOUTS = {
    "zero1": (2, (ZERO1,)),
    "zero3": (2, (ZERO3,)),
    "autocast-zero3": (2, (ZERO3, AUTOCAST)),
    "lora-zero3": (2, (ZERO3, LORA)),
    "dora-zero3": (2, (ZERO3, LORA.replace("all-linear]", "all-linear], use_dora: true"))),
    "compiled-zero3": (2, (ZERO3, "model.compile=true")),
    "recomputed-zero3": (2, (ZERO3, "model.activations_checkpoint_granularity=full")),
    "cp2-zero3": (2, (ZERO3, f"{STRATEGY}context_parallel_size=2")),
    "replicas-zero3": (4, (ZERO3, f"{STRATEGY}dp_replicate=2")),
    "tp2-zero3": (4, (ZERO3, TP2)),
    "pp2-zero1": (4, (ZERO1, PP2)),
}


@pytest.fixture(scope="module")
def ranks():
    """``ranks(n)``: a pool of that many processes, which stay for the tests of a module."""
    return partial(RankPool, lasting=True)


Trained = tuple[list[float], dict[str, torch.Tensor], int]


def trained(world: int, steps: int, *overrides: str) -> Trained:
    """The losses of this rank, its shards of what a checkpoint would have, and the bytes that it sends to data
    parallel ranks in the last step."""
    with running(configured("llama-tiny", "float8", world, TENSORWISE, *overrides)) as (engine, model, step):
        losses = [float(step().loss.loss) for _ in range(steps - 1)]
        with WireBytes(dimensions(engine.mesh)) as wire:
            losses.append(float(step().loss.loss))
        held = model.state_dict()
        shards = {name: local_of(getattr(each, "tensor", each)).clone() for name, each in held.items()}
        return losses, shards, wire.sent["dp"] - SUMS


def trained_both_ways(world: int, steps: int, *overrides: str) -> tuple[Trained, Trained]:
    """The same where weights are gathered wide, and where they are gathered in float8."""
    return trained(world, steps, *overrides, WIDE), trained(world, steps, *overrides)


@pytest.fixture(scope="module")
def both_ways(ranks, pytestconfig):
    """``both_ways(world, *overrides)``: what each rank gives, once for all tests of a layout."""
    steps = shortened(pytestconfig, STEPS)
    return cache(lambda world, *more: ranks(world).run(trained_both_ways, world, steps, *more, timeout_s=480))


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, ("zero3",)))
def test_nothing_changes_within_twenty_steps(both_ways, layout):
    world, overrides = LAYOUTS[layout]
    for (expected, others, _), (losses, weights, _) in both_ways(world, *overrides):
        assert losses == expected
        assert losses[-1] < losses[0]
        assert all(torch.equal(weights[name], other) for name, other in others.items())


@pytest.mark.slow
def test_losses_are_those_of_unsharded_weights(ranks):
    layouts = ((f"{STRATEGY}zero1=false",), (ZERO3,))
    whole, sharded = (ranks(2).run(trained, 2, STEPS, AUTOCAST, *layout, timeout_s=240) for layout in layouts)
    for (expected, *_), (losses, *_) in zip(whole, sharded, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", [slow((ZERO1,)), (ZERO3,)], ids=["zero1", "zero3"])
def test_weights_are_gathered_in_one_byte_per_element(both_ways, layout):
    """In addition, ranks exchange the largest element of each weight once per step: 4 bytes in an all-reduce."""

    wide, narrow = ([sent for _, _, sent in each] for each in zip(*both_ways(2, *layout), strict=True))
    for found, more in ((wide, (TENSORWISE, WIDE)), (narrow, (TENSORWISE,))):
        assert set(found) == {sent["dp"] for sent in planned("llama-tiny", "float8", 2, *layout, *more)}
    gathers = 1 if ZERO1 in layout else 2 * (MICRO_BATCHES // 2)
    maxima = 4 * WEIGHTS
    assert wide[0] - narrow[0] == gathers * ELEMENTS // 2 - maxima
    for without in (("precision.scaling=rowwise",), (TENSORWISE, "precision.skip=['*']")):
        assert planned("llama-tiny", "float8", 2, *layout, *without)[0]["dp"] == wide[0]


@pytest.mark.slow
def test_frozen_weights_are_gathered_as_they_are_stored(both_ways):
    """In two bytes per element."""
    for (_, _, wide), (_, _, narrow) in both_ways(2, ZERO3, LORA):
        assert narrow == wide == planned("llama-tiny", "float8", 2, ZERO3, LORA, TENSORWISE)[0]["dp"]


def test_products_of_what_was_gathered_are_those_of_the_weight():
    draw = torch.Generator().manual_seed(0)
    product, cast = Float8Product("tensorwise", (), "cpu"), Float8Cast(torch.float8_e4m3fn)
    for exponent in range(-14, 4):
        hidden, weight = (torch.randn(16, 16, generator=draw).bfloat16() for _ in range(2))
        spread = torch.randint(-7, 1, weight.shape, generator=draw)
        weight = (weight.float() * 10.0 ** (exponent + spread)).bfloat16()
        weight[0, 0] = 0
        (scale,) = cast.scales(weight.abs().max().float().reshape(1))
        sent = cast.narrowed(weight, scale)
        assert sent.dtype.itemsize == 1
        arrived = cast.widened(sent.view(torch.uint8), scale, torch.bfloat16)
        assert not torch.equal(arrived, weight)
        found, expected = (_with_gradients(product, hidden, each) for each in (arrived, weight))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _with_gradients(product, hidden, weight):
    inputs, factor = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = product(inputs, factor)
    outputs.sum().backward()
    return outputs, inputs.grad, factor.grad


@pytest.mark.parametrize("scaling", ["rowwise", "rowwise_with_gw_hp"])
def test_rows_are_not_gathered_in_float8(scaling):
    with pytest.raises(ConfigError, match="float8 needs scaling: tensorwise"):
        load(
            "recipe:llama-tiny",
            ["precision.type=float8", f"precision.scaling={scaling}", "precision.all_gather=float8"],
        )
