"""Sums of gradients have the dtype that the precision names, over micro-batches and over ranks.

8 micro-batches of the same samples give the gradient of two, since each gives an 8th of it, or a half: powers of two.
Sums in bfloat16, which has 8 bits, lose the last ones, up to 0.4 %. From torch 2.15 gradients of norms are not rounded
to bfloat16 before they are added up in float32, which then rounds them.
"""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import process_group

from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors.training import GradientSumsRounded
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from nxdt_core.train.step import initialize_parallel_model
from tests.engine.precision.precision_run import SEQ, SMALL
from tests.sampling import slow

REPEATS = 8
STRATEGY = "distributed_strategy."
WIDE = "precision={type: manual, xla_downcast_bf16: 1, fp32_grad_acc: true}"
NARROW = "precision={type: manual, xla_downcast_bf16: 1}"
PIPELINE = f"{STRATEGY}pipeline_model_parallel_size=2"


def gradients(overrides, repeats):
    """This rank's gradients of one step over the same micro-batch ``repeats`` times."""
    config = load("recipe:llama-tiny", [*SMALL, "data.micro_batch_size=1", *overrides])
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    ids = torch.randint(272, (1, SEQ + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(input_ids=ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
    model.run_train([batch] * repeats, build.objective(config))
    found = {name: local_of(p.grad).float().clone() for name, p in model.named_parameters()}
    engine.shutdown()
    return found


def few_and_many(overrides):
    """This rank's gradients of two micro-batches and of many."""
    rows = 1 if PIPELINE in overrides else 2
    with process_group():
        return [
            gradients(["trainer.devices=2", f"data.global_batch_size={rows * count}", *overrides], count)
            for count in (2, REPEATS)
        ]


@pytest.fixture(scope="module")
def both(ranks):
    """``both(*overrides)``: of each rank, gradients of two micro-batches and of many."""

    def both(*overrides):
        return [(few[name], many[name]) for few, many in ranks(2).run(few_and_many, overrides) for name in few]

    return both


@pytest.mark.parametrize(
    "overrides",
    [
        slow(("precision.type=mixed_precision", f"{STRATEGY}zero_stage=1")),
        ("precision.type=mixed_precision", f"{STRATEGY}zero_stage=3"),
        slow(("precision.type=mixed_precision", PIPELINE)),
        (WIDE, f"{STRATEGY}zero1=false"),
        slow((WIDE, f"{STRATEGY}zero_stage=1")),
    ],
)
def test_sums_in_float32_lose_nothing(both, overrides):
    for few, many in both(*overrides):
        torch.testing.assert_close(many, few, rtol=1e-6, atol=0)


@pytest.mark.parametrize("overrides", [(NARROW, f"{STRATEGY}zero1=false"), slow(("precision.type=bf16SR",))])
def test_sums_in_bfloat16_do(both, overrides):
    assert not all(torch.equal(few, many) for few, many in both(*overrides))


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_that_shards_would_round_are_refused_and_planned_to_be(stage):
    overrides = [*SMALL, WIDE, f"{STRATEGY}zero_stage={stage}", "data.micro_batch_size=2"]
    words = rf"manual sums up gradients in float32 .* bfloat16 alone; ZeRO-{stage} adds up the 4 micro-batches"
    with raises(GradientSumsRounded, match=words):
        gradients(overrides, 4)
    with raises(GradientSumsRounded, match=words):
        plan(load("recipe:llama-tiny", overrides))
    plan(load("recipe:llama-tiny", [*overrides, "data.micro_batch_size=8"]))
