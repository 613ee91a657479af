"""Tokens per second and MFU of a Llama of 1.2B parameters on one accelerator, beside a bare loop of the same model.

Claim: training through nxdt reaches at least 0.98 of the loop that a person would write. Shapes of Llama 3.2 1B without
tied embeddings, sequences of 4,096 tokens, bfloat16 products over float32 weights, compiled, AdamW fused, clipping.
Both are trained by turns in one process; rows give medians over the rounds, the ratio is the median of the paired ones.
MFU counts the model's own FLOPs (no recomputation) against the dense bfloat16 peak of :mod:`nxdt_core.devices`.

    python benchmarks/accelerator.py [--rounds 5] [--steps 10] [--small]

``--small`` takes a model of 1M parameters, which shows on any machine that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.devices import peak_flops, profile_of
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.training import assemble, primitives
from nxdt_core.training.state import TrainState

WARM_UP = 3
LARGE = {
    "model.num_layers": 16,
    "model.hidden_size": 2048,
    "model.ffn_hidden_size": 8192,
    "model.num_attention_heads": 32,
    "model.num_kv_heads": 8,
    "model.vocab_size": 128256,
    "model.max_position_embeddings": 4096,
    "data.seq_length": 4096,
}
SMALL = {"data.seq_length": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    config = load(
        "recipe:llama-tiny",
        [
            *(f"{key}={value}" for key, value in (SMALL if options.small else LARGE).items()),
            "data.global_batch_size=4",
            "data.micro_batch_size=4",
            "model.compile=true",
            "precision.type=autocast",
        ],
    )
    engine = assemble.engine(config)
    engine.start()
    device, data = engine.device, config.run.data
    if profile_of(device).host and not options.small:
        print("no accelerator on this machine: nothing to measure")
        return
    vocabulary = assemble.model_builder(config).vocab_size
    tokens = torch.randint(vocabulary, (4, data.seq_length + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(input_ids=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
    loops = {"nxdt": through_nxdt(config, engine, batch), "bare loop": bare(config, engine, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in loops.values():
        timed(step, WARM_UP, device)  # compiles
    for turn in range(options.rounds):
        for name in loops if turn % 2 == 0 else reversed(loops):
            seconds[name].append(timed(loops[name], options.steps, device))
    flops = assemble.model_builder(config).flops_per_token(data.seq_length)
    peak = peak_flops(device, "bfloat16")
    for name, walls in seconds.items():
        rate = batch.input_ids.numel() / statistics.median(walls)
        mfu = "" if peak is None else f"   MFU {flops * rate / peak:.1%}"
        print(f"{name:10} {rate:10,.0f} tokens/s{mfu}")
    ratios = [theirs / ours for ours, theirs in zip(seconds["nxdt"], seconds["bare loop"], strict=True)]
    print(f"ratio      {statistics.median(ratios):10.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
    engine.shutdown()


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


def wait(device: torch.device) -> None:
    if not profile_of(device).host:
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main()
