"""Norms and activation functions that are computed again: what a layer keeps, and that no product runs twice."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.config import load
from nxdt_core.engine.compile import compile_layers
from nxdt_core.engine.estimate.trace import LiveBytes
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from tests.engine.compile.partition import Kept, Partition
from tests.engine.tensor.test_gathered_again import NORMS, SELECTIVE, STEPS, trained_in_float64
from tests.engine.test_traffic import PP2, TP2

ROWS, SEQ, HIDDEN, INNER, HEADS, KV_HEADS = 2, 32, 64, 160, 4, 2
TOKENS = ROWS * SEQ
NAMES = {
    "llama-tiny": ("LlamaRMSNorm", "ActivationMultiplyMLP"),
    "mixtral-tiny": ("MixtralRMSNorm", "ActivationMultiplyMLP"),
    "gpt-tiny": ("Norm", "ActivationMultiplyMLP"),
}
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


def sizes(layers: int, *overrides: str) -> list[str]:
    return [
        "trainer.accelerator=cpu",
        f"model.num_layers={layers}",
        f"model.hidden_size={HIDDEN}",
        f"model.ffn_hidden_size={INNER}",
        f"model.num_attention_heads={HEADS}",
        f"model.num_kv_heads={KV_HEADS}",
        f"data.seq_length={SEQ}",
        f"data.micro_batch_size={ROWS}",
        "data.reset_attention_mask=false",
        *overrides,
    ]


class Products(TorchDispatchMode):
    """Counts matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in PRODUCTS
        return func(*args, **(kwargs or {}))


class Step:
    """One forward and backward of a model on the CPU."""

    def __init__(self, recipe: str, layers: int, *names: str, autocast: bool = False) -> None:
        config = load(f"recipe:{recipe}", sizes(layers))
        builder = build.model_builder(config)
        torch.manual_seed(1)
        model = builder.build()
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        if names:
            apply_recompute(model, builder.plan(), granularity="selective", names=names)
        ids = torch.arange(TOKENS).view(ROWS, SEQ)
        known = [*model.parameters(), *model.buffers(), ids]
        with ExitStack() as stack:
            products = stack.enter_context(Products())
            live = stack.enter_context(LiveBytes(known))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = model(ids).float().square().mean()
            self.kept = live.total
            loss.backward()
        self.products = products.count
        self.gradients = [parameter.grad for parameter in model.parameters()]


def kept_by_a_layer(recipe: str, *names: str, autocast: bool = False) -> int:
    one, two = (Step(recipe, layers, *names, autocast=autocast).kept for layers in (1, 2))
    return two - one


def minimum(width: int, stream: int) -> int:
    """Bytes of the layer's input, of the sum that the second norm reads, of queries, keys and values, of attention's
    output and the products of gate and up, and numbers per row. ``width``: of a product's element."""
    queries_keys_values = HIDDEN * (1 + 2 * KV_HEADS / HEADS)
    products = queries_keys_values + HIDDEN + 2 * INNER
    rows = 2 * 4 + HEADS * 4
    return int(TOKENS * (2 * HIDDEN * stream + products * width + rows))


def test_a_layer_keeps_its_input_and_the_results_of_products_alone():
    names = NAMES["llama-tiny"]
    assert kept_by_a_layer("llama-tiny", *names) == minimum(4, 4)
    before = kept_by_a_layer("llama-tiny")
    norms, inner = 2 * TOKENS * HIDDEN * 4, 2 * TOKENS * INNER * 4
    assert before == minimum(4, 4) + norms + inner


def test_under_autocast_the_copies_for_products_are_not_kept_either():
    """Copies of weights are left, which autocast makes for each product, and those of the rotary factors."""
    names = NAMES["llama-tiny"]
    copies = 2 * (HIDDEN * HIDDEN * 3 + 3 * HIDDEN * INNER + 2 * SEQ * HIDDEN // HEADS)
    assert kept_by_a_layer("llama-tiny", *names, autocast=True) == minimum(2, 4) + copies


@pytest.mark.parametrize("recipe", NAMES)
def test_no_product_runs_again_and_gradients_are_equal_to_the_bit(recipe):
    before, now = Step(recipe, 1), Step(recipe, 1, *NAMES[recipe])
    assert now.products == before.products
    assert now.kept < 0.9 * before.kept
    assert all(torch.equal(one, other) for one, other in zip(before.gradients, now.gradients, strict=True))


def test_the_plan_estimates_what_is_kept():
    both = f"model.activations_checkpoint_recompute=[{','.join(NAMES['llama-tiny'])}]"
    memories = [
        plan(load("recipe:llama-tiny", sizes(layers, "precision.type=fp32", SELECTIVE, both))).estimate.ranks[0].memory
        for layers in (1, 2)
    ]
    assert memories[1].activations - memories[0].activations == minimum(4, 4)


def test_a_compiled_layer_keeps_no_more():
    """By the partition that inductor uses. Without the names it keeps results that it prefers to computing them."""

    builder = build.model_builder(load("recipe:llama-tiny", sizes(1)))
    model = builder.build()
    apply_recompute(model, builder.plan(), granularity="selective", names=NAMES["llama-tiny"])
    rotary = model.rotary(torch.arange(SEQ))
    kept, partition = Kept([*model.parameters(), *model.buffers(), *rotary]), Partition()
    with partition.on_cpu():
        compile_layers(model, builder.plan(), backend=partition.backend)
        with kept.counting():
            model.layers["0"](torch.randn(ROWS, SEQ, HIDDEN, requires_grad=True), rotary, None)
    assert kept.size <= minimum(4, 4)


LAYOUTS = {
    "tp": (*TP2, *NORMS),
    "pp": (*PP2, *NORMS),
    "zero3": ("distributed_strategy.zero_stage=3", *NORMS),
}


@pytest.mark.slow  # tensor/test_gathered_again.py recomputes the same on two ranks, and gradients are compared above
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_without_recomputation(ranks, steps, layout):
    """In float64."""
    keys = LAYOUTS[layout]
    before, now = (
        ranks(2).run(trained_in_float64, steps(STEPS), "llama-tiny", *each, timeout_s=240)
        for each in (keys[: -len(NORMS)], keys)
    )
    assert before == [pytest.approx(losses, rel=1e-9) for losses in now]


@pytest.mark.slow
def test_losses_of_distributed_experts_are_those_without_recomputation(ranks, steps):
    keys = ("distributed_strategy.expert_model_parallel_size=2",)
    names = (SELECTIVE, f"model.activations_checkpoint_recompute=[{','.join(NAMES['mixtral-tiny'])}]")
    before, now = (
        ranks(2).run(trained_in_float64, steps(STEPS), "mixtral-tiny", *keys, *more, timeout_s=240)
        for more in ((), names)
    )
    assert before == [pytest.approx(losses, rel=1e-9) for losses in now]
