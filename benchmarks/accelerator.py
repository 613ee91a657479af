"""Tokens per second, MFU and peak memory of Llama on one accelerator, beside a bare loop of the same model.

Claim: training through nxdt reaches at least 0.98 of the loop that a person would write; status 1 where it does not.
Sequences of 4,096 tokens, compiled, AdamW fused, clipping.

    1b  Llama 3.2 1B without tied embeddings, bfloat16 products over float32 weights, micro-batch 4
    3b  Llama 3.2 3B likewise, bfloat16 weights over float32 masters here and autocast in the loop, micro-batch 1
    8b  Llama 3 8B, weights, gradients and optimizer state in bfloat16, micro-batch 2; alone, since two do not fit

Both are trained by turns in one process; rows give medians over the rounds, the ratio is the median of the paired ones.
MFU is in both conventions of :mod:`nxdt_core.nn.flops`, against the dense bfloat16 peak of
:mod:`nxdt_core.devices`. Peak memory is of one loop alone, over what the other holds.

    python benchmarks/accelerator.py [--shape 1b] [--rounds 5] [--steps 10]

``--shape small``, a model of 0.2M parameters, shows on any machine that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.devices import max_memory_bytes, peak_flops, profile_of, reset_max_memory
from nxdt_core.nn.flops import token_flops
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.training import assemble, primitives
from nxdt_core.training.state import TrainState

WARM_UP = 3
CLAIM = 0.98


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained."""

    layers: int = 4
    hidden: int = 64
    ffn: int = 176
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 272
    sequence: int = 4096
    micro_batch: int = 4
    precision: tuple[str, ...] = ("precision.type=autocast",)
    beside_a_loop: bool = True

    def config(self) -> ResolvedConfig:
        """Of a run."""
        keys = {
            "model.num_layers": self.layers,
            "model.hidden_size": self.hidden,
            "model.ffn_hidden_size": self.ffn,
            "model.num_attention_heads": self.heads,
            "model.num_kv_heads": self.kv_heads,
            "model.vocab_size": self.vocabulary,
            "model.max_position_embeddings": self.sequence,
            "model.compile": "true",
            "data.seq_length": self.sequence,
            "data.global_batch_size": self.micro_batch,
            "data.micro_batch_size": self.micro_batch,
        }
        return load("recipe:llama-tiny", [*(f"{key}={value}" for key, value in keys.items()), *self.precision])


SHAPES = {
    "1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocabulary=128256),
    "3b": Shape(
        layers=28,
        hidden=3072,
        ffn=8192,
        heads=24,
        kv_heads=8,
        vocabulary=128256,
        micro_batch=1,
        precision=("precision.type=mixed_precision",),
    ),
    "8b": Shape(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        vocabulary=128256,
        micro_batch=2,
        precision=("precision.type=bf16SR", "precision.optimizer_state=bfloat16"),
        beside_a_loop=False,
    ),
    "small": Shape(sequence=128),
}


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    config = shape.config()
    engine = assemble.engine(config)
    engine.start()
    device = engine.device
    if profile_of(device).host and options.shape != "small":
        print("no accelerator on this machine: nothing to measure")
        return 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (shape.micro_batch, shape.sequence + 1), generator=generator)
    batch = Batch(input_ids=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
    loops: dict[str, Callable[[], object]] = {}
    peaks: dict[str, float] = {}
    for name, made in {"nxdt": through_nxdt, **({"bare loop": bare} if shape.beside_a_loop else {})}.items():
        held = allocated(device)
        loops[name] = made(config, engine, batch)
        timed(loops[name], WARM_UP, device)  # compiles
        peaks[name] = (max_memory_bytes(device) - held) / 2**30
        reset_max_memory(device)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.rounds):
        for name in loops if turn % 2 == 0 else reversed(loops):
            seconds[name].append(timed(loops[name], options.steps, device))
    flops = token_flops(assemble.model_builder(config), shape.sequence)
    peak = peak_flops(device, "bfloat16")
    for name, walls in seconds.items():
        rate = batch.input_ids.numel() / statistics.median(walls)
        mfu = "" if peak is None else f"   MFU {flops.strict * rate / peak:.1%} (PaLM {flops.palm * rate / peak:.1%})"
        print(f"{name:10} {rate:10,.0f} tokens/s{mfu}   peak {peaks[name]:.1f} GiB")
    engine.shutdown()
    if not shape.beside_a_loop:
        return 0
    ratios = [theirs / ours for ours, theirs in zip(seconds["nxdt"], seconds["bare loop"], strict=True)]
    print(f"ratio      {statistics.median(ratios):10.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
    return int(options.shape != "small" and statistics.median(ratios) < CLAIM)


def through_nxdt(config: ResolvedConfig, engine: ParallelEngine, batch: Batch) -> Callable[[], object]:
    model = primitives.initialize_parallel_model(config, engine)
    optimizer = primitives.initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = assemble.objective(config), assemble.schedule(config), TrainState()
    return lambda: primitives.train_step(model, optimizer, [batch], objective, schedule, state, max_norm=1.0)


def bare(config: ResolvedConfig, engine: ParallelEngine, batch: Batch) -> Callable[[], object]:
    device = engine.device
    with device:
        model = assemble.model_builder(config).build()
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        ids, labels = batch.input_ids.to(device), batch.labels.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds of one step of ``steps``."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def allocated(device: torch.device) -> int:
    """Bytes that are held; on a host none are known."""
    return 0 if profile_of(device).host else torch.accelerator.memory_allocated(device)


def wait(device: torch.device) -> None:
    if not profile_of(device).host:
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
