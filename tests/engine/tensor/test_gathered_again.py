"""Sequence parallelism that gathers the inputs of tensor blocks again: what is kept, sent, and in which order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.ranks import process_group
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.estimate.trace import LiveBytes
from nxdt_core.train.plan import plan
from tests.engine.compile.partition import Kept, Partition
from tests.engine.test_traffic import (
    BLOCKS,
    HIDDEN,
    LAYERS,
    ROWS,
    SEQ,
    SP2,
    STATES,
    configured,
    running,
    sent_in_a_step,
    trained,
)
from tests.sampling import slow

AGAIN = (*SP2, "distributed_strategy.sequence_parallel_regather=true")
SELECTIVE = "model.activations_checkpoint_granularity=selective"
NORMS = (SELECTIVE, "model.activations_checkpoint_recompute=[LlamaRMSNorm,ActivationMultiplyMLP]")
LORA = ("adapter.name=lora", "adapter.lora_rank=2")
WHOLE = ROWS * SEQ * HIDDEN
"""Elements of hidden states of whole sequences."""


class Kernels(TorchDispatchMode):
    """Names of collectives and matrix products, in order."""

    KNOWN = ("_allgather_base_", "alltoall_base_", "mm", "addmm", "bmm")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if name in self.KNOWN:
            self.names.append({"_allgather_base_": "gather", "alltoall_base_": "scatter"}.get(name, "product"))
        return func(*args, **(kwargs or {}))


def kept_by_layers(precision: str, *overrides: str, recipe: str = "llama-tiny") -> int:
    """Bytes that the layers of this rank hold between forward and backward, without what embedding and head hold."""
    with running(configured(recipe, precision, 2, *overrides)) as (_, model, _):
        (module,) = model.local_modules()
        hidden = torch.randn(ROWS, SEQ // 2, HIDDEN, requires_grad=True)
        rotary = module.rotary(torch.arange(SEQ))
        known = [hidden, *rotary, *(getattr(p, "_local_tensor", p) for p in (*module.parameters(), *module.buffers()))]
        with (
            LiveBytes(known) as live,
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"),
        ):
            for layer in module.layers.values():
                hidden = layer(hidden, rotary, None)
        return settled(live)


def settled(live: LiveBytes) -> int:
    """Bytes once gloo's threads have let go of the last messages, which they do after those have arrived."""
    sizes = [live.total]
    while len(sizes) < 10 or len(set(sizes[-10:])) > 1:
        time.sleep(0.01)
        sizes.append(live.total)
    return sizes[-1]


def kept_by_compiled_layers(precision: str, *overrides: str) -> tuple[int, int]:
    """The same, and the gathers in the graph of backward, which all layers share."""
    partition = Partition()
    with partition.on_cpu(), running(configured("llama-tiny", precision, 2, "model.compile=true", *overrides)) as parts:
        (module,) = parts[1].local_modules()
        hidden = torch.randn(ROWS, SEQ // 2, HIDDEN, requires_grad=True)
        rotary = module.rotary(torch.arange(SEQ))
        kept = Kept([*rotary, *module.parameters(), *module.buffers()])
        narrow = precision == "autocast"
        with kept.counting(), torch.autocast("cpu", torch.bfloat16, enabled=narrow, cache_enabled=False):
            for layer in module.layers.values():
                hidden = layer(hidden, rotary, None)
        hidden.sum().backward()
    return kept.size, sum("all_gather" in name for name in partition.graphs[1])


def results(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Of several calls of a function on this rank, one after the other."""
    with process_group(timeout_s=240):
        return [function(*call) for call in calls]


@pytest.fixture
def each(ranks):
    """``each(function, *calls)``: what each call returned on each of two ranks; all are in the same processes."""
    return lambda function, *calls: list(zip(*ranks(2).run(results, function, calls, timeout_s=240), strict=True))


def order_in_backward(*overrides: str) -> list[str]:
    """Of one micro-batch through one layer."""
    with running(configured("llama-tiny", "fp32", 2, *overrides)) as (_, model, _):
        (module,) = model.local_modules()
        hidden = torch.randn(ROWS, SEQ // 2, HIDDEN, requires_grad=True)
        output = module.layers["0"](hidden, module.rotary(torch.arange(SEQ)), None)
        with Kernels() as kernels:
            output.sum().backward()
        return kernels.names


@pytest.mark.parametrize(("precision", "size"), [("autocast", 2), slow("fp32", 4)])
def test_blocks_keep_a_share_of_their_input(each, precision, size):
    """A whole input of each block before, in the dtype of its products, and 1/TP of it now."""
    before, now = each(kept_by_layers, (precision, *SP2), (precision, *AGAIN))
    saved = 2 * LAYERS * WHOLE * size // 2
    assert [one - other for one, other in zip(before, now, strict=True)] == [saved] * 2


def test_with_recomputed_norms_no_input_of_a_block_is_kept(each):
    """The shard is the norm's result, which is made again of the norm's own input."""
    before, now = each(kept_by_layers, ("fp32", *AGAIN), ("fp32", *AGAIN, *NORMS))
    shards = 2 * LAYERS * WHOLE * 4 // 2
    inner = LAYERS * ROWS * SEQ * 32 * 4 * 2  # silu(gate) and its product with up, 64 channels on two ranks
    assert [one - other for one, other in zip(before, now, strict=True)] == [shards + inner] * 2


@pytest.mark.parametrize(("precision", "size"), [slow("autocast", 2), slow("fp32", 4)])
def test_compiled_layers_gather_again(ranks, precision, size):
    """Shards are norms' results, which a compiled backward computes again anyway."""
    before, now = (ranks(2).run(kept_by_compiled_layers, precision, *each, timeout_s=240) for each in (SP2, AGAIN))
    assert [one[0] - other[0] for one, other in zip(before, now, strict=True)] == [2 * LAYERS * WHOLE * size] * 2
    assert [gathers for _, gathers in (*before, *now)] == [2, 2, 4, 4]


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("autocast", 2)])
def test_the_plan_estimates_what_compiled_layers_do_not_keep(precision, size):
    before, now = (
        plan(configured("llama-tiny", precision, 2, "model.compile=true", *layout)).estimate.ranks[0].memory
        for layout in (SP2, AGAIN)
    )
    assert before.activations - now.activations == 2 * LAYERS * WHOLE * size


@pytest.mark.parametrize("more", [(), slow(NORMS)], ids=["alone", "norms"])
@pytest.mark.parametrize(("precision", "size"), [("autocast", 2), slow("fp32", 4)])
def test_one_gather_of_each_block_is_added(each, precision, size, more):
    """As many as the plan counts, in the compute dtype."""
    run = ("llama-tiny", precision, 2)
    before, now = each(sent_in_a_step, (*run, *SP2), (*run, *AGAIN, *more))
    added = size * 2 * LAYERS * STATES // 2
    assert [other["tp"] - one["tp"] for one, other in zip(before, now, strict=True)] == [added] * 2
    estimates = [
        plan(configured("llama-tiny", precision, 2, *layout)).estimate.ranks[0] for layout in (SP2, (*AGAIN, *more))
    ]
    assert estimates[1].sent["tp"] - estimates[0].sent["tp"] == added
    assert BLOCKS * size > added


def test_the_plan_estimates_what_is_not_kept():
    before, now = (plan(configured("llama-tiny", "fp32", 2, *each)).estimate.ranks[0].memory for each in (SP2, AGAIN))
    assert before.activations - now.activations == 2 * LAYERS * WHOLE * 4 // 2


def test_a_gather_begins_before_the_products_of_its_block(ranks):
    """Products of feed-forward (6) and attention (8 and the core's) run while the input is on its way."""
    for names in ranks(2).run(order_in_backward, *AGAIN, timeout_s=240):
        joined = " ".join(names)
        for block in joined.removesuffix(" scatter").split(" scatter "):
            gradient, again, *products = block.split()
            assert (gradient, again) == ("gather", "gather")
            assert set(products) == {"product"}
            assert len(products) >= 6


STEPS = 20
CASES = {
    "norms": (*AGAIN, *NORMS),
    "alone": AGAIN,
    "attention": (*AGAIN, SELECTIVE, "model.activations_checkpoint_recompute=[CoreAttention]"),
    "block": (*AGAIN, SELECTIVE, "model.activations_checkpoint_recompute=[LlamaMLP,LlamaRMSNorm]"),
    "full": (*AGAIN, "model.activations_checkpoint_granularity=full"),
    "lora": (*AGAIN, *NORMS, *LORA),
}


@pytest.mark.parametrize("case", ["norms", *(slow(name) for name in CASES if name != "norms")])
def test_losses_are_those_of_gathered_inputs_that_are_kept(each, steps, case):
    """In float64."""
    adapter = LORA if case == "lora" else ()
    run = (steps(STEPS), "llama-tiny")
    (before, _), (now, _) = each(trained_in_float64, (*run, *SP2, *adapter), (*run, *CASES[case]))
    assert before == pytest.approx(now, rel=1e-9)
    assert before[0] > before[-1]


@pytest.mark.slow
def test_losses_of_experts_are_those_of_gathered_inputs_that_are_kept(each, steps):
    more = (SELECTIVE, "model.activations_checkpoint_recompute=[MixtralRMSNorm,ActivationMultiplyMLP]")
    run = (steps(STEPS), "mixtral-tiny")
    (before, _), (now, _) = each(trained_in_float64, (*run, *SP2), (*run, *AGAIN, *more))
    assert before == pytest.approx(now, rel=1e-9)


def trained_in_float64(steps: int, recipe: str, *overrides: str) -> list[float]:
    components = Path(__file__).parents[1] / "matrix" / "components.py"
    return trained(configured(recipe, "float64", 2, f"plugins.local=[{components}]", *overrides), steps=steps)
