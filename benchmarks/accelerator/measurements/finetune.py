"""Fine-tuning and mixtures of experts by ``nxdt train``: packed chats, LoRA, Mixtral, float8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerator.bench import Bench
from accelerator.runs import SHAPES, Shape, random_tokens, run_file, train_figures

__all__ = ["float8", "lora", "mixtral", "packed_chats"]

_EVERY, _INTERVALS = 4, 4
_WORDS = ("the", "river", "boat", "was", "slow", "and", "cold", "but", "nobody", "asked", "why", "it", "came")
_MIXTRAL = Shape(layers=8, hidden=2048, ffn=3584, heads=16, kv_heads=8, vocabulary=32000, micro_batch=2)
"""About 1.6B parameters, 8 experts a layer."""


def packed_chats(bench: Bench, sequence: int) -> None:
    """The 1B model on packed conversations: attention within documents, loss on the answers."""
    shape, what = SHAPES["1b"].sized(bench), f"packed chats of {sequence:,}, 1b"
    with bench.part(what):
        train_figures(bench, what, _chat_file(bench, f"sft-{sequence}", shape, sequence))


def lora(bench: Bench) -> None:
    """LoRA on all linear layers of the 8B model in bfloat16: on random tokens, then on packed conversations."""
    shape, sequence = SHAPES["8b"].sized(bench), 128 if bench.small else 4096
    every = 1 if bench.small else _EVERY
    adapter = {
        "name": "lora",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ["all-linear"],
    }
    with bench.part("LoRA 8b"):
        path = run_file(
            bench,
            "lora",
            steps=every * _INTERVALS,
            every=every,
            model=shape.model(bench, sequence),
            data=random_tokens(bench, shape, sequence, every * _INTERVALS * shape.micro_batch),
            precision=shape.precision,
            adapter=adapter,
        )
        train_figures(bench, "LoRA 8b", path)
    with bench.part("LoRA 8b, packed chats"):
        train_figures(bench, "LoRA 8b, packed chats", _chat_file(bench, "lora-chats", shape, sequence, adapter=adapter))


def mixtral(bench: Bench) -> None:
    """A small Mixtral with bounded capacity and dropless, on random tokens."""
    shape, sequence = _MIXTRAL.sized(bench), 128 if bench.small else 4096
    every = 1 if bench.small else _EVERY
    steps = every * _INTERVALS
    data = random_tokens(bench, shape, sequence, steps * shape.micro_batch)
    for kind, moe in {"capacity 1.25": {"capacity_factor": 1.25}, "dropless": {"dropless": True}}.items():
        what = f"Mixtral {kind}"
        with bench.part(what):
            model = {**shape.model(bench, sequence), "name": "mixtral", "moe": {"num_experts": 8, "top_k": 2, **moe}}
            path = run_file(
                bench,
                f"mixtral-{kind.partition(' ')[0]}",
                steps=steps,
                every=every,
                model=model,
                data=data,
                precision=shape.precision,
            )
            train_figures(bench, what, path)


def float8(bench: Bench) -> None:
    """The 1B model in float8, if a precision of that name is installed."""
    from accelerator.measurements.train import pretrain
    from nxdt_core.kernel import Kernel

    names = Kernel.start().registry.names("precision_policy")
    found = next((name for name in names if "float8" in name.lower() or "fp8" in name.lower()), None)
    if found is None:
        bench.row("float8", outcome=f"not offered; precisions: {', '.join(sorted(names))}")
    else:
        pretrain(bench, "1b", precision=found)


def _chat_file(bench: Bench, name: str, shape: Shape, sequence: int, **sections: Any) -> Path:
    """Write a run over packed conversations, in micro-batches of one sequence: masks cost the square of its length."""
    sequence, every = (256, 1) if bench.small else (sequence, _EVERY)
    chats = bench.work / f"{name}.jsonl"
    steps = every * _INTERVALS
    _write_chats(chats, tokens=sequence * shape.micro_batch * steps)
    data = {
        "name": "sft-chat",
        "train_files": [str(chats)],
        "packing": True,
        "tokenizer": {"library": "huggingface", "model": "package://nxdt_plugin_sft_chat/data/tokenizer"},
        "seq_length": sequence,
        "micro_batch_size": 1,
        "global_batch_size": shape.micro_batch,
        "truncation": "keep_start",
    }
    return run_file(
        bench,
        name,
        steps=steps,
        every=every,
        model=shape.model(bench, sequence),
        data=data,
        precision=shape.precision,
        **sections,
    )


def _write_chats(path: Path, *, tokens: int) -> None:
    """Conversations of skewed lengths, at least ``tokens`` tokens of the shipped tokenizer in all."""
    import numpy as np

    random, written = np.random.default_rng(1), 0
    with path.open("w", encoding="utf-8") as file:
        while written < tokens:  # a word is at least a token
            count = int(min(2000, 4 + random.lognormal(5.0, 0.9)))
            said = {"user": random.choice(_WORDS, 1 + count // 3), "assistant": random.choice(_WORDS, count)}
            messages = [{"role": role, "content": " ".join(words)} for role, words in said.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
            written += count
