"""Operations per token in both conventions, against values derived by hand and against torch's own counter."""

import pytest
import torch
from nxdt_plugin_llama.builder import LlamaBuilder, MistralBuilder
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig
from torch.utils.flop_counter import FlopCounterMode

from nxdt_core.run.callbacks.metrics import token_flops

SIZES = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16384,
}
LAYER = 48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 80  # query, key and value, output, feed-forward
WEIGHTS = 2 * LAYER + 96 * 48
PER_PAIR = 12 * 2 * 48  # of a query and a key, over both layers


@pytest.mark.parametrize("length", [1, 7, 100, 4096, 10_000])
def test_strict_counts_earlier_positions_and_palm_counts_all(length):
    found = token_flops(LlamaBuilder(LlamaConfig(**SIZES)), length)
    assert found.palm == 6 * WEIGHTS + PER_PAIR * length
    assert found.strict == pytest.approx(6 * WEIGHTS + PER_PAIR * (length + 1) / 2, rel=1e-12)


def test_strict_counts_what_a_window_holds():
    """Positions 1, 2, 3 see so many, and the other seven see 4 each."""
    found = token_flops(MistralBuilder(MistralConfig(**SIZES, sliding_window=4)), 10)
    assert found.palm == 6 * WEIGHTS + PER_PAIR * 4
    assert found.strict == pytest.approx(6 * WEIGHTS + PER_PAIR * (1 + 2 + 3 + 7 * 4) / 10)


class FreezesAllButHeads:
    """Freezes the layers and gives each query projection a trained matrix."""

    def apply(self, module, plan):
        for layer in module.layers.values():
            layer.requires_grad_(False)
            layer.attention.q_proj.register_parameter("added", torch.nn.Parameter(torch.empty(48, 5)))
        return plan


def test_frozen_weights_cost_no_gradient_of_their_own():
    found = token_flops(LlamaBuilder(LlamaConfig(**SIZES)), 20, [FreezesAllButHeads()])
    weights = 4 * 2 * LAYER + 6 * 96 * 48 + 6 * 2 * 48 * 5
    assert found.palm == 6 * WEIGHTS + PER_PAIR * 20
    assert found.strict == pytest.approx(weights + PER_PAIR * 21 / 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_counts_the_same_products(frozen):
    """Attention aside, which its counter takes in full."""
    length, rows = 12, 2
    module = LlamaBuilder(LlamaConfig(**SIZES)).build()
    if frozen:
        module.layers.requires_grad_(False)
        module.embed_tokens.requires_grad_(True)  # so that a gradient passes through the first layer
    with FlopCounterMode(display=False) as counter:
        module(torch.randint(96, (rows, length))).sum().backward()
    products = {name: count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name)}
    assert sum(products.values()) == rows * length * ((4 if frozen else 6) * 2 * LAYER + 6 * 96 * 48)
