"""Tokens per second of what ``nxdt generate`` does with a checkpoint."""

from __future__ import annotations

import time
from dataclasses import replace

from accelerator.bench import GIB, Bench
from accelerator.runs import SHAPES, run_file

__all__ = ["tokens_per_second"]


def tokens_per_second(bench: Bench) -> None:
    """Save a 1B model after two steps, load it, continue a short and a long prompt."""
    shape = SHAPES["1b"].sized(bench)
    if not bench.small:
        shape = replace(shape, vocabulary=32000)
    sequence = 128 if bench.small else 4096
    with bench.part("load"):
        model = shape.model(bench, sequence)
        model |= {"compile": False, "optim": {"name": "sgd", "lr": 1e-4, "sched": {}}}  # a small checkpoint
        path = run_file(
            bench,
            "generate",
            steps=2,
            every=1,
            model=model,
            data={
                "name": "text",
                "train_files": ["package://nxdt_plugin_text/data/kjv.txt"],
                "tokenizer": {"library": "byte"},
                "seq_length": sequence,
                "micro_batch_size": 1,
                "global_batch_size": 1,
            },
            precision={"type": "bf16SR"},
            checkpoint={"enabled": True},
        )
        _generate(bench, str(path), sequence)


def _generate(bench: Bench, path: str, sequence: int) -> None:
    from nxdt_core.config import load
    from nxdt_core.distributed.devices import max_memory_bytes, reset_max_memory
    from nxdt_core.train import train
    from nxdt_core.train.generate import Sampling, load_model

    config = load(path, [])
    train(config)
    begun = time.perf_counter()
    model = load_model(config.checkpoint_uri)
    bench.wait()
    bench.row("load", seconds=time.perf_counter() - begun)
    wanted = 4 if bench.small else 64
    for prompt in (16, sequence // 4):
        reset_max_memory(bench.device)
        sampling = Sampling(max_new_tokens=wanted, temperature=1.0, top_k=None, seed=0)
        times = [time.perf_counter()]
        for _ in model.continuation([65 + number % 26 for number in range(prompt)], sampling):
            times.append(time.perf_counter())
        bench.row(
            f"prompt of {prompt:,} tokens",
            tokens=len(times) - 1,
            first_token_ms=1e3 * (times[1] - times[0]),
            tokens_per_s=(len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None,
            peak_gib=max_memory_bytes(bench.device) / GIB,
        )
