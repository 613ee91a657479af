"""Bytes that a rank sends in a step, counted on real processes: those of the compute dtype, and those of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import CPU
from nxdt_core.engine.estimate.rank import dimensions
from nxdt_core.engine.estimate.trace import WireBytes
from nxdt_core.engine.layout import LayoutOptions
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.sampling import slow

STRATEGY = "distributed_strategy."
TP2 = (f"{STRATEGY}tensor_model_parallel_size=2",)
SP2 = (*TP2, f"{STRATEGY}sequence_parallel=true")
PP2 = (f"{STRATEGY}pipeline_model_parallel_size=2",)
ROWS, SEQ, HIDDEN, LAYERS, MICRO_BATCHES = 2, 16, 32, 2, 4
SUMS = 16
"""Bytes of the loss, its weight and the gradient norm, over a group of all ranks."""
STATES = ROWS * SEQ * HIDDEN * MICRO_BATCHES
"""Elements of hidden states in a step on one data parallel rank."""


def configured(recipe: str, precision: str, world: int, *overrides: str) -> ResolvedConfig:
    return load(
        f"recipe:{recipe}",
        [
            "trainer.accelerator=cpu",
            f"trainer.devices={world}",
            f"precision.type={precision}",
            f"model.num_layers={LAYERS}",
            f"model.hidden_size={HIDDEN}",
            "model.ffn_hidden_size=64",
            "model.num_attention_heads=4",
            "model.num_kv_heads=2",
            f"data.seq_length={SEQ}",
            f"data.micro_batch_size={ROWS}",
            f"data.global_batch_size={ROWS * MICRO_BATCHES}",
            "data.reset_attention_mask=false",
            *overrides,
        ],
    )


@contextmanager
def running(config: ResolvedConfig) -> Iterator[tuple[Any, Any, Callable[[], Any]]]:
    """The engine and the model of this rank, and a function that trains a step on a batch that is always the same."""
    engine = build.engine(config)
    engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    ids = torch.randint(200, (ROWS, SEQ), generator=torch.Generator().manual_seed(engine.rank_info.dp_rank))
    batches = [Batch(input_ids=ids, labels=ids)] * (MICRO_BATCHES // engine.rank_info.dp_size)
    parts = (model, optimizer, batches, build.objective(config), build.schedule(config), TrainState())
    try:
        yield engine, model, lambda: train_step(*parts)
    finally:
        engine.shutdown()


def trained(config: ResolvedConfig, *, steps: int) -> list[float]:
    """The losses of this rank."""
    with running(config) as (_, _, step):
        return [float(step().loss.loss) for _ in range(steps)]


def sent_in_a_step(recipe: str, precision: str, world: int, *overrides: str) -> dict[str, int]:
    """Of this rank, by dimension."""
    with running(configured(recipe, precision, world, *overrides)) as (engine, _, step):
        if engine.mesh.size("pp") > 1:
            step()  # the first one also sends shapes
        with WireBytes(dimensions(engine.mesh)) as wire:
            step()
    return dict(wire.sent)


def planned(recipe: str, precision: str, world: int, *overrides: str) -> list[dict[str, int]]:
    return [dict(rank.sent) for rank in plan(configured(recipe, precision, world, *overrides)).estimate.ranks]


@pytest.fixture(scope="module")
def counted(ranks):
    """Return the bytes that every rank sends over a dimension; those of the plan are the same. A run is made once."""

    @cache
    def count(dimension: str, precision: str, *overrides: str, recipe: str = "llama-tiny") -> int:
        found = ranks(2).run(sent_in_a_step, recipe, precision, 2, *overrides, timeout_s=240)
        sizes = {sent[dimension] - SUMS for sent in found}
        assert sizes == {sent[dimension] for sent in planned(recipe, precision, 2, *overrides)}
        return sizes.pop()

    return count


BLOCKS = STATES // 2 * 4 * 2 * LAYERS
"""Elements of hidden states that a rank sends for tensor blocks: attention and feed-forward, at entry and exit, forward
and back. An all-reduce at one of both ends is as much as a gather and a reduce-scatter at each."""
HEAD = EMBEDDING = STATES // 2 * 2


@pytest.mark.parametrize("precision", ["autocast", slow("mixed_precision")])  # the test of weights has masters
@pytest.mark.parametrize("layout", [slow(TP2), SP2], ids=["tp", "tp-sp"])
def test_tensor_parallel_traffic_is_in_the_compute_dtype(counted, layout, precision):
    """But for the embedding's sums under autocast, of which one term is not zero: its residual stream is float32."""
    wide, narrow = counted("tp", "fp32", *layout), counted("tp", precision, *layout)
    rest = wide - 4 * (BLOCKS + HEAD + EMBEDDING)  # of the loss, and of gradients: float32
    assert narrow == 2 * (BLOCKS + HEAD) + (4 if precision == "autocast" else 2) * EMBEDDING + rest
    assert rest < narrow / 40


@pytest.mark.parametrize("precision", ["autocast", slow("mixed_precision")])
@pytest.mark.parametrize("method", ["ring", slow("gather")])
def test_context_parallel_traffic_is_in_the_compute_dtype(ranks, method, precision):
    """Keys and values in forward and again in backward, and their gradients; a hop or a collective each."""
    half = STATES // HIDDEN // 2 * 2 * (2 * 8)  # tokens of a rank, keys and values, two heads of 8
    layout = (f"{STRATEGY}context_parallel_size=2", f"{STRATEGY}context_parallel_method={method}")
    found = ranks(2).run(sent_in_a_step, "llama-tiny", precision, 2, *layout, timeout_s=240)
    expected = planned("llama-tiny", precision, 2, *layout)[0]
    assert expected["cp"] == 2 * 3 * half * LAYERS
    # Weights and their gradients go to the same ranks.
    assert [sent["cp"] - SUMS for sent in found] == [expected["cp"] + expected["dp"]] * 2


@pytest.mark.parametrize("precision", ["autocast", slow("mixed_precision")])
def test_pipeline_traffic_is_in_the_compute_dtype(counted, precision):
    assert counted("pp", precision, *PP2) == 2 * STATES  # one rank sends hidden states, the other their gradients


def test_dispatched_tokens_are_in_the_compute_dtype(ranks):
    sizes = ("model.moe.capacity_factor=1.0", "model.moe.dropless=false")
    layout = (f"{STRATEGY}expert_model_parallel_size=2", f"{STRATEGY}zero1=false", *sizes)
    wide, narrow = (
        [sent["ep"] for sent in ranks(2).run(sent_in_a_step, "mixtral-tiny", precision, 2, *layout, timeout_s=240)]
        for precision in ("fp32", "autocast")
    )
    trips, rows = 4 * LAYERS * MICRO_BATCHES // 2, 2 * ROWS * SEQ  # each token goes to two experts
    dispatched = trips * rows * HIDDEN * 2 // 2  # half of them to the other rank, in two bytes
    assert planned("mixtral-tiny", "autocast", 2, *layout)[0]["ep"] == dispatched
    # The group also sums gradients, in float32 either way.
    assert [one - other for one, other in zip(wide, narrow, strict=True)] == [dispatched, dispatched]


EXPERTS_APART = (
    *SP2,
    f"{STRATEGY}expert_model_parallel_size=2",
    f"{STRATEGY}zero1=false",
    "model.moe.capacity_factor=1.0",
    "model.moe.dropless=false",
)
ON_MACHINES = (("trainer.devices=4",), ("trainer.devices=2", "trainer.num_nodes=2"))


def whole_and_sliced() -> list[dict[str, int]]:
    """Planned traffic of four ranks on one machine, and on two with experts on both."""
    return [planned("mixtral-tiny", "autocast", 4, *EXPERTS_APART, *machines)[0] for machines in ON_MACHINES]


def test_tensor_parallel_ranks_dispatch_slices_where_experts_are_on_several_machines():
    whole, sliced = whole_and_sliced()
    rows = 4 * LAYERS * MICRO_BATCHES // 2 * 2 * ROWS * SEQ * HIDDEN  # there and back, forward and backward, top 2
    assert whole["ep"] == 2 * rows // 2
    assert sliced["ep"] == whole["ep"] // 2
    # Gathers and sums of what arrived, and parts of the sequence for slices in the place of a sum at the end.
    tokens = 2 * LAYERS * MICRO_BATCHES // 2 * ROWS * SEQ * HIDDEN // 2
    assert sliced["tp"] - whole["tp"] == 2 * (rows // 2 + tokens // 2 - tokens)


def test_compiled_layers_dispatch_slices_with_a_capacity_alone():
    sizes = MeshSizes(tp=2, ep=2, dp_shard=2)
    for overrides, found in (((), "all"), (("model.compile=true",), "capacity")):
        run = configured("mixtral-tiny", "fp32", 4, *EXPERTS_APART, *ON_MACHINES[1], *overrides).run
        assert LayoutOptions.of(run, CPU, sizes).sliced_tokens == found


@pytest.mark.slow
def test_slices_are_sent_as_planned(ranks):
    here, there = (
        ranks(4).run(sent_in_a_step, "mixtral-tiny", "autocast", 4, *EXPERTS_APART, *machines, timeout_s=240)
        for machines in ON_MACHINES
    )
    whole, sliced = whole_and_sliced()
    expected = {dim: whole[dim] - sliced[dim] for dim in ("ep", "tp")}
    for one, other in zip(here, there, strict=True):  # gradients go to the same ranks in both
        assert {dim: one[dim] - other[dim] for dim in expected} == expected


@pytest.mark.parametrize("stage", [1, slow(3)])
def test_weights_of_matrix_products_are_gathered_in_the_compute_dtype(counted, stage):
    layout = f"{STRATEGY}zero_stage={stage}"
    wide, narrow, masters = (counted("dp", each, layout) for each in ("fp32", "autocast", "mixed_precision"))
    layers, head = LAYERS * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * 64), 272 * HIDDEN
    passes = 1 if stage == 1 else 2  # the head stays gathered between its forward and its backward
    gathers = 1 if stage == 1 else MICRO_BATCHES // 2
    assert wide - narrow == 2 * (passes * layers + head) * gathers // 2
    # With masters, all that is gathered is in bfloat16: embedding and norms, too.
    norms, last_norm = LAYERS * 2 * HIDDEN, HIDDEN
    assert wide - masters == 2 * (passes * (layers + norms) + 2 * head + last_norm) * gathers // 2
