"""What the estimate says of compiled layers against what autograd saves of them, by inductor's partition of graphs."""

from __future__ import annotations

import pytest
import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.engine.compile import compile_layers
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from tests.engine.compile.partition import Kept, Partition
from tests.sampling import slow


def sized(hidden: int, inner: int, heads: int, kv_heads: int, length: int) -> tuple[str, ...]:
    return (
        f"model.hidden_size={hidden}",
        f"model.ffn_hidden_size={inner}",
        f"model.num_attention_heads={heads}",
        f"model.num_kv_heads={kv_heads}",
        f"data.seq_length={length}",
        f"model.max_position_embeddings={length}",
    )


GPT = ("model.hidden_size=64", "model.num_attention_heads=4", "data.seq_length=128")
DROPOUT = ("model.hidden_dropout=0.1", "model.ffn_dropout=0.1")
EXPERTS = (*sized(64, 128, 4, 2, 64), "model.moe.dropless=false", "model.moe.capacity_factor=1.0")
CASES = {
    "llama": ("llama-tiny", sized(64, 160, 4, 2, 32), 0.0, 0.05),
    "llama-long": ("llama-tiny", sized(128, 352, 8, 2, 256), 0.0, 0.06),
    "llama-wide": ("llama-tiny", sized(256, 704, 4, 4, 256), 0.0, 0.05),
    "gpt": ("gpt-tiny", GPT, 0.0, 0.05),
    "gpt-gated": ("gpt-tiny", (*GPT, "model.activation=swiglu"), 0.0, 0.05),
    "gpt-dropout": ("gpt-tiny", (*GPT, *DROPOUT), 0.0, 0.05),
    "mistral": ("mistral-tiny", (), 0.08, 0.05),
    "mixtral": ("mixtral-tiny", EXPERTS, 0.005, 0.12),
    "hf": ("hf-tiny", (), 0.15, 0.16),
}
"""Recipe, its keys, and the relative difference that is allowed in float32 and under autocast. There the estimate is
too large as a rule: a graph keeps an attention block's result in bfloat16, and not the sum with the residual stream."""


def configured(recipe: str, precision: str, layers: int, *keys: str) -> ResolvedConfig:
    sizes = (
        "trainer.accelerator=cpu",
        "data.micro_batch_size=2",
        "data.global_batch_size=2",
        "data.reset_attention_mask=false",
    )
    more = (f"precision.type={precision}", "model.compile=true", f"model.num_layers={layers}")
    return load(f"recipe:{recipe}", [*sizes, *more, *keys])


def kept(config: ResolvedConfig) -> int:
    """Bytes of storages that autograd saves in forward, without parameters and buffers."""
    builder = build.model_builder(config)
    model = builder.build().train()
    ids = torch.zeros(2, config.run.data.seq_length, dtype=torch.int64)
    saved, partition = Kept([*model.parameters(), *model.buffers()]), Partition()
    narrow = config.run.precision.type == "autocast"
    with partition.on_cpu(), saved.counting(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        compile_layers(model, builder.plan(), backend=partition.backend)
        model(ids)
    return saved.size


@pytest.mark.slow  # the next one compares estimates, test_recomputed_operations.py what layers keep
@pytest.mark.parametrize("precision", [slow("fp32"), "autocast"])
@pytest.mark.parametrize("case", ["llama", *(slow(case) for case in CASES if case != "llama")])
def test_a_compiled_layer_keeps_what_is_estimated(case, precision):
    recipe, keys, *within = CASES[case]
    one, two = (configured(recipe, precision, layers, *keys) for layers in (1, 2))
    estimated = [plan(config).estimate.ranks[0].memory.activations for config in (one, two)]
    difference = kept(two) - kept(one)
    assert estimated[1] - estimated[0] == pytest.approx(difference, rel=within[precision == "autocast"], abs=0)


def test_a_compiled_layer_is_estimated_to_keep_less_than_one_as_it_is_written():
    compiled, written = (
        plan(configured("llama-tiny", "autocast", 2, f"model.compile={value}")).estimate.ranks[0]
        for value in ("true", "false")
    )
    assert compiled.memory.activations < 0.9 * written.memory.activations
    assert compiled.parameters == written.parameters
    assert compiled.sent == written.sent
