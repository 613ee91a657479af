"""Claim: each model's forward and backward take no longer than those of transformers' model of the same shape.

Float32 on the CPU; on an accelerator, where there is one, bfloat16 and both compiled. Both have the same weights
and the same loss, in one process, by turns: A B, B A, A B, … Each row gives the median of the paired ratios ours to
theirs and their quartiles, in CPU time on a host and in wall time elsewhere; below 1 is faster.

    python benchmarks/models/forward_backward.py [llama-tiny …] [--rounds 15] [--threads 1] [--device cpu] [--parts]

``--parts`` times each building block against torch's, transformers' or the usual way of doing it instead. The claim of
Mixtral's block, 8 experts and top 2 at a quarter of its widths, is half of the time of a loop over experts whose
matrices are stacked, as they are in transformers 5. At small widths the loop copies less and is closer; where
matrices are not stacked, it copies nothing, and both are paced by the same products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from nxdt_plugin_gpt.builder import GPTBuilder
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_llama.builder import LlamaBuilder, MistralBuilder
from nxdt_plugin_llama.config import LlamaConfig, MistralConfig
from nxdt_plugin_mixtral.builder import MixtralBuilder
from nxdt_plugin_mixtral.config import MixtralConfig, MoEConfig
from torch.nn import functional

from nxdt_core.distributed.devices import HOST, current_device, profile_of
from nxdt_core.hf.directory import load_hf
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.rotary import RotaryEmbedding, rotate
from nxdt_core.protocols.model import ModelBuilder

Work = Callable[[], object]

_15M: Mapping[str, Any] = {
    "num_layers": 6,
    "hidden_size": 384,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 6,
    "vocab_size": 8192,
}
_WIDE: Mapping[str, Any] = {**_15M, "ffn_hidden_size": 1536, "max_position_embeddings": 1024}

SHAPES: Mapping[str, tuple[ModelBuilder, int, int]] = {
    "llama-tiny": (
        LlamaBuilder(
            LlamaConfig(
                num_layers=4, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_kv_heads=2, vocab_size=272
            )
        ),
        2,
        128,
    ),
    "llama": (LlamaBuilder(LlamaConfig(**_15M, num_kv_heads=2)), 4, 256),
    "llama-50M": (
        LlamaBuilder(
            LlamaConfig(num_layers=8, hidden_size=640, ffn_hidden_size=1728, num_attention_heads=10, vocab_size=8192)
        ),
        1,
        1024,
    ),
    "mistral": (MistralBuilder(MistralConfig(**_15M, num_kv_heads=2, sliding_window=256)), 1, 1024),
    "gpt2": (GPTBuilder(GPTConfig(**_WIDE, activation="gelu_tanh")), 4, 256),
    "neox": (
        GPTBuilder(
            GPTConfig(
                **_WIDE,
                transformer_block_type="gpt_j",
                position_embedding_type="rope",
                rotary_percentage=0.25,
                share_embeddings_and_output_weights=False,
            )
        ),
        4,
        256,
    ),
    "mixtral": (
        MixtralBuilder(
            MixtralConfig(
                **{**_15M, "num_layers": 3, "ffn_hidden_size": 512},
                num_kv_heads=2,
                moe=MoEConfig(output_router_logits=False),
            )
        ),
        4,
        256,
    ),
}
"""Name → builder, sequences, tokens of each."""

LIMITS = {
    "mixture 1024 x 3584, stacked": 0.5,
    "mixture 1024 x 3584, apart": 1.2,
    "mixture 256 x 896, apart": 1.2,
    "rotary 4 x 16": 1.2,
}
"""Largest ratios, where that is not 1."""


def main() -> int:
    """Print the table; status 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=current_device())
    parser.add_argument("--parts", action="store_true", help="the building blocks, on the CPU")
    options = parser.parse_args()
    device = HOST if options.parts else options.device
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    slower = False
    if options.parts:
        for name, (ours, theirs) in parts().items():
            slower |= report(name, ours, theirs, options.rounds, device) > LIMITS.get(name, 1)
    for name in () if options.parts else options.names or SHAPES:
        slower |= report(name, *models(*SHAPES[name], device), options.rounds, device) > 1
    return int(slower)


def report(name: str, ours: Work, theirs: Work, rounds: int, device: torch.device) -> float:
    """Time both by turns, print a row, return the median ratio."""

    def spent(work: Work) -> float:
        return seconds_of(work, device)

    spent(ours), spent(theirs)  # which compiles, where that is asked for
    ratios, mine, other = [], [], []
    for turn in range(rounds):
        if turn % 2:
            b, a = spent(theirs), spent(ours)
        else:
            a, b = spent(ours), spent(theirs)
        ratios.append(a / b), mine.append(a), other.append(b)
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name:24} ratio {median:.3f} (quartiles {low:.3f} to {high:.3f}, {rounds} rounds); "
        f"median ms: ours {statistics.median(mine) * 1e3:.2f}, theirs {statistics.median(other) * 1e3:.2f}",
        flush=True,
    )
    return median


def seconds_of(work: Work, device: torch.device, at_least_s: float = 0.05) -> float:
    """Time of one call, averaged over as many as make a stretch that the clock resolves."""
    host = profile_of(device).host
    now = time.process_time if host else time.perf_counter
    calls, start, spent = 0, now(), 0.0
    while calls == 0 or spent < at_least_s:
        work()
        calls += 1
        if not host:
            torch.accelerator.synchronize(device)
        spent = now() - start
    return spent / calls


def models(builder: ModelBuilder, batch: int, seq: int, device: torch.device) -> tuple[Work, Work]:
    """One step of each model: forward, mean cross-entropy, backward."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    keys = builder.config_to_hf()
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # without dropout
    ours = builder.build()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours.load_state_dict(load_hf(directory, builder), strict=False)  # not strict: a tied head is given once
    tokens = torch.randint(0, keys["vocab_size"], (batch, seq + 1))
    tokens = tokens.to(device)
    ours.to(device), theirs.to(device)
    ids, labels = tokens[:, :-1], tokens[:, 1:].flatten()

    def step(model: torch.nn.Module, logits: Callable[[], torch.Tensor]) -> None:
        functional.cross_entropy(logits().flatten(0, 1), labels).backward()
        model.zero_grad(set_to_none=True)

    difference = (ours(ids) - theirs(ids, use_cache=False).logits).abs().max().item()
    if difference > 1e-4:
        sys.exit(f"the two models differ by {difference}: nothing to compare")
    if not profile_of(device).host:
        for model in (ours, theirs):
            model.to(torch.bfloat16).compile()
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
    return pairs | mixtures()


def mixtures() -> dict[str, tuple[Work, Work]]:
    """Mixtral's dropless block against a loop over its experts, of matrices that are stacked or apart."""
    pairs: dict[str, tuple[Work, Work]] = {}
    for tokens, size, ffn in ((256, 256, 896), (512, 1024, 3584)):
        block = MixtureOfExperts(
            router=TopKRouter(size, 8, top_k=2, normalize=True), experts=SwiGLUExperts(size, ffn, 8)
        )
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        stacked = [block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj]
        apart = [[torch.nn.Parameter(matrix.detach().clone()) for matrix in each] for each in stacked]
        hidden = torch.randn(1, tokens, size, requires_grad=True)
        grad = torch.randn_like(hidden)
        trained = (hidden, *block.parameters(), *(matrix for each in apart for matrix in each))

        def step(output: Callable[[], torch.Tensor], grad=grad, trained=trained) -> None:
            output().backward(grad)
            for tensor in trained:
                tensor.grad = None

        for name, matrices in (("stacked", stacked), ("apart", apart)):
            torch.testing.assert_close(block(hidden), loop(block, matrices, hidden), rtol=1e-4, atol=1e-3)
            pairs[f"mixture {size} x {ffn}, {name}"] = (
                lambda step=step, block=block, hidden=hidden: step(lambda: block(hidden)),
                lambda step=step, block=block, hidden=hidden, matrices=matrices: step(
                    lambda: loop(block, matrices, hidden)
                ),
            )
    return pairs


def loop(
    block: MixtureOfExperts, matrices: Sequence[Sequence[torch.Tensor] | torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Return the usual mixture: one expert after the other, each with its tokens. ``matrices``: gate, up and down of
    each."""
    rows = hidden.flatten(0, 1)
    affinities = functional.linear(rows, block.router.weight).softmax(-1)
    weights, chosen = affinities.topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(rows)
    for expert in range(len(matrices[0])):
        gate, up, down = (matrix[expert] for matrix in matrices)
        tokens, places = torch.where(chosen == expert)
        own = rows[tokens]
        activated = functional.silu(functional.linear(own, gate)) * functional.linear(own, up)
        output.index_add_(0, tokens, functional.linear(activated, down) * weights[tokens, places, None])
    return output.view_as(hidden)


def halves(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the usual rotation: full tables, and a copy of the heads with halves swapped."""
    first, second = heads.chunk(2, dim=-1)
    return heads * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


if __name__ == "__main__":
    sys.exit(main())
