"""Tokens per second of what ``nxdt generate`` does with a checkpoint, and of transformers with the same shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerator.bench import GIB, Bench
from accelerator.runs import SHAPES, run_file

if TYPE_CHECKING:
    from nxdt_core.train.generate import LoadedModel
    from nxdt_core.train.sampling import Sampling

__all__ = ["tokens_per_second"]


def tokens_per_second(bench: Bench) -> None:
    """Save a 1B model after two steps, load it, and continue one prompt, a long one, 8 and 64: with recorded passes of
    compiled layers and of layers as they are written, with kernels that are launched one by one, and by transformers.
    """
    shape = SHAPES["1b"].sized(bench)
    if not bench.small:
        shape = replace(shape, vocabulary=32000)
    sequence = 128 if bench.small else 4096
    with bench.part("load"):
        model = shape.model(bench, sequence)
        model |= {"compile": False, "optim": {"name": "sgd", "lr": 1e-4, "sched": {}}}  # a small checkpoint
        text = {
            "name": "text",
            "train_files": ["package://nxdt_plugin_text/data/kjv.txt"],
            "tokenizer": {"library": "byte"},
            "seq_length": sequence,
            "micro_batch_size": 1,
            "global_batch_size": 1,
        }

        def run(*, compiled: bool) -> Path:
            return run_file(
                bench,
                "generate",
                steps=2,
                every=1,
                model={**model, "compile": compiled and bench.compiles},
                data=text,
                precision={"type": "bf16SR"},
                checkpoint={"enabled": True},
            )

        _generate(bench, run, sequence)


def _generate(bench: Bench, run: Callable[..., Path], sequence: int) -> None:
    from nxdt_core.config import load
    from nxdt_core.distributed.devices import PROFILES
    from nxdt_core.run import train
    from nxdt_core.train.generate import load_model
    from nxdt_core.train.sampling import Sampling

    config = load(str(run(compiled=False)), [])
    train(config)
    begun = time.perf_counter()
    model = load_model(config.checkpoint_uri)
    bench.wait()
    bench.row("load", seconds=time.perf_counter() - begun)
    compiled = load_model(config.checkpoint_uri, config=str(run(compiled=True)))
    wanted = 2 if bench.small else 128
    profile = PROFILES[bench.device.type]
    for rows, prompt in ((1, 16), (1, sequence // 4), (8, 16), (64, 16)):
        prompts = [[65 + number % 26 for number in range(prompt)]] * rows
        what, sampling = f"{rows} x {prompt:,} tokens", Sampling(max_new_tokens=wanted)
        _timed(bench, f"nxdt, compiled layers, {what}", _nxdt(compiled, prompts, sampling))
        _timed(bench, f"nxdt, {what}", _nxdt(model, prompts, sampling))
        PROFILES[bench.device.type] = replace(profile, records=False)
        _timed(bench, f"nxdt, not recorded, {what}", _nxdt(model, prompts, sampling))
        PROFILES[bench.device.type] = profile
        _timed(bench, f"transformers, {what}", _transformers(bench, prompts, wanted))


def _nxdt(model: LoadedModel, prompts: list[list[int]], sampling: Sampling) -> Callable[[], int]:
    """Return what continues the prompts by the model's own writer, through end tokens."""
    writer = replace(model.writer, stop_ids=())
    return lambda: sum(1 for _ in writer.tokens(prompts, sampling))


def _transformers(bench: Bench, prompts: list[list[int]], wanted: int) -> Callable[[], int]:
    """Return what continues the prompts by transformers' ``generate``; its model has initial weights."""
    import torch

    from accelerator.measurements.peers import PEERS

    torch.manual_seed(0)
    shape = replace(SHAPES["1b"].sized(bench), vocabulary=32000)
    theirs, *_ = PEERS["transformers"](shape, 4096, bench.device)
    theirs = theirs.to(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.tensor(prompts, device=bench.device)
    asked = {"max_new_tokens": wanted, "min_new_tokens": wanted, "do_sample": False, "use_cache": True}

    def write() -> int:
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **asked)
        return int(found[:, ids.shape[1] :].numel())

    return write


def _timed(bench: Bench, what: str, write: Callable[[], int]) -> None:
    import torch

    from nxdt_core.distributed.devices import profile_of

    with bench.part(what):
        write()
        bench.wait()
        profile_of(bench.device).operations.reset_max_memory(bench.device)
        begun = time.perf_counter()
        tokens = write()
        bench.wait()
        seconds = time.perf_counter() - begun
        peak = (profile_of(bench.device).operations.max_memory_bytes(bench.device) or 0) / GIB
        with torch.profiler.profile() as profiler:
            write()
        launches = sum(event.count for event in profiler.key_averages() if "Launch" in event.key) / tokens
        bench.row(what, tokens=tokens, tokens_per_s=tokens / seconds, launches_per_token=launches, peak_gib=peak)
