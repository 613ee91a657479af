"""Claim: the Llama plugin's forward and backward take no longer than those of transformers' Llama of the same shape.

Float32 on the CPU, both models with the same weights and the same loss, in one process, by turns: A B, B A, A B, …
Each row gives the median of the paired ratios ours / theirs in CPU time and their quartiles; below 1 is faster.

    python benchmarks/model_speed.py [--rounds 15] [--threads 1] [--parts]

``--parts`` times each building block against torch's or transformers' way of doing it instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from nxdt_plugin_llama.builder import LlamaBuilder
from nxdt_plugin_llama.config import LlamaConfig
from torch.nn import functional

from nxdt_core.nn.loss import cross_entropy_sum
from nxdt_core.nn.norm import RMSNorm
from nxdt_core.nn.rotary import RotaryEmbedding, rotate

Work = Callable[[], object]

SHAPES: dict[str, tuple[LlamaConfig, int, int]] = {
    "tiny": (
        LlamaConfig(
            num_layers=4, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_kv_heads=2, vocab_size=272
        ),
        2,
        128,
    ),
    "15M": (
        LlamaConfig(
            num_layers=6, hidden_size=384, ffn_hidden_size=1024, num_attention_heads=6, num_kv_heads=2, vocab_size=8192
        ),
        4,
        256,
    ),
    "50M": (
        LlamaConfig(
            num_layers=8,
            hidden_size=640,
            ffn_hidden_size=1728,
            num_attention_heads=10,
            num_kv_heads=10,
            vocab_size=8192,
        ),
        1,
        1024,
    ),
}
"""Name → configuration, sequences, tokens of each."""


def main() -> int:
    """Print the table; status 1 where a median is above 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    pairs = parts() if options.parts else {name: models(*shape) for name, shape in SHAPES.items()}
    slower = False
    for name, (ours, theirs) in pairs.items():
        slower |= report(name, ours, theirs, options.rounds) > 1
    return int(slower)


def report(name: str, ours: Work, theirs: Work, rounds: int) -> float:
    """Time both by turns, print a row, return the median ratio."""
    cpu_seconds(ours), cpu_seconds(theirs)
    ratios, mine, other = [], [], []
    for turn in range(rounds):
        if turn % 2:
            b, a = cpu_seconds(theirs), cpu_seconds(ours)
        else:
            a, b = cpu_seconds(ours), cpu_seconds(theirs)
        ratios.append(a / b), mine.append(a), other.append(b)
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name:24} ratio {median:.3f} (quartiles {low:.3f} to {high:.3f}, {rounds} rounds); "
        f"median CPU ms: ours {statistics.median(mine) * 1e3:.2f}, theirs {statistics.median(other) * 1e3:.2f}",
        flush=True,
    )
    return median


def cpu_seconds(work: Work, at_least_s: float = 0.05) -> float:
    """CPU time of one call, averaged over as many as make a stretch that the clock resolves."""
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < at_least_s:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def models(config: LlamaConfig, batch: int, seq: int) -> tuple[Work, Work]:
    """One step of each model: forward, mean cross-entropy, backward."""
    from transformers import AutoModelForCausalLM
    from transformers import LlamaConfig as TheirConfig

    builder = LlamaBuilder(config)
    theirs = AutoModelForCausalLM.from_config(TheirConfig(**builder.config_to_hf()), attn_implementation="sdpa")
    ours = builder.build()
    state = theirs.state_dict()
    for entry in builder.hf_key_map():
        for layer in range(config.num_layers if "*" in entry.name else 1):
            source = state[entry.hf_names[0].replace("*", str(layer))]
            ours.get_parameter(entry.name.replace("*", str(layer))).data.copy_(source)
    tokens = torch.randint(0, config.vocab_size, (batch, seq + 1))
    ids, labels = tokens[:, :-1], tokens[:, 1:].flatten()

    def step(model: torch.nn.Module, logits: Callable[[], torch.Tensor]) -> None:
        functional.cross_entropy(logits().flatten(0, 1), labels).backward()
        model.zero_grad(set_to_none=True)

    difference = (ours(ids) - theirs(ids, use_cache=False).logits).abs().max().item()
    if difference > 1e-4:
        sys.exit(f"the two models differ by {difference}: nothing to compare")
    return lambda: step(ours, lambda: ours(ids)), lambda: step(theirs, lambda: theirs(ids, use_cache=False).logits)


def parts() -> dict[str, tuple[Work, Work]]:
    """Building blocks, forward and backward, against the usual composition."""
    pairs: dict[str, tuple[Work, Work]] = {}
    for size in (64, 256, 1024):
        norm, hidden = RMSNorm(size), torch.randn(2, 512, size, requires_grad=True)
        grad = torch.randn_like(hidden)
        pairs[f"RMSNorm {size}"] = (
            lambda norm=norm, hidden=hidden, grad=grad: norm(hidden).backward(grad),
            lambda norm=norm, hidden=hidden, grad=grad: functional.rms_norm(
                hidden, norm.weight.shape, norm.weight, norm.eps
            ).backward(grad),
        )
    for heads, width in ((4, 16), (8, 64)):
        query = torch.randn(2, 512, heads, width, requires_grad=True)
        grad = torch.randn_like(query)
        cos, sin = RotaryEmbedding(width)(torch.arange(512))
        pairs[f"rotary {heads} x {width}"] = (
            lambda query=query, grad=grad, cos=cos, sin=sin: rotate(query, cos, sin).backward(grad),
            lambda query=query, grad=grad, cos=cos, sin=sin: halves(query, cos, sin).backward(grad),
        )
    for rows, vocab in ((2048, 4096), (1024, 32000)):
        logits, labels = torch.randn(rows, vocab, requires_grad=True), torch.randint(0, vocab, (rows,))
        pairs[f"cross-entropy {vocab}"] = (
            lambda logits=logits, labels=labels: cross_entropy_sum(logits, labels)[0].backward(),
            lambda logits=logits, labels=labels: functional.cross_entropy(logits, labels, reduction="sum").backward(),
        )
    return pairs


def halves(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The usual rotation: full tables, and a copy of the heads with halves swapped."""
    first, second = heads.chunk(2, dim=-1)
    return heads * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


if __name__ == "__main__":
    sys.exit(main())
