"""Fine-tuning and mixtures of experts by ``nxdt train``: packed chats, LoRA, QLoRA, Mixtral."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerator.bench import Bench
from accelerator.runs import SHAPES, Shape, length, measure, steps_of

__all__ = ["grpo", "lora", "mixtral", "packed_chats", "qlora"]

_WORDS = ("the", "river", "boat", "was", "slow", "and", "cold", "but", "nobody", "asked", "why", "it", "came")
_MIXTRAL = Shape(layers=8, hidden=2048, ffn=3584, heads=16, kv_heads=8, vocabulary=32000, micro_batch=2)
"""About 1.6B parameters, 8 experts a layer."""
_LORA = {
    "name": "lora",
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["all-linear"],
}


def packed_chats(bench: Bench) -> None:
    """The 1B model on packed conversations: attention within documents, loss on the answers."""
    measure(bench, "packed chats 1b", SHAPES["1b"], data=_chats(bench, SHAPES["1b"]))


def lora(bench: Bench) -> None:
    """LoRA on all linear layers of the 8B model in bfloat16: on packed conversations, then on random tokens."""
    shape = SHAPES["8b"]
    measure(bench, "LoRA 8b, packed chats", shape, data=_chats(bench, shape), adapter=_LORA)
    measure(bench, "LoRA 8b", shape, adapter=_LORA)


def qlora(bench: Bench) -> None:
    """LoRA on all linear layers of the 8B model over 4-bit weights, on random tokens."""
    measure(bench, "QLoRA 8b", SHAPES["8b"], adapter={**_LORA, "base_dtype": "nf4"})


def grpo(bench: Bench) -> None:
    """GRPO of the 1B model: 8 answers of 128 tokens to each of 4 prompts a step."""
    prompts, longest = bench.work / "prompts.jsonl", 8 if bench.small else 128
    prompts.write_text('{"prompt": "Only vowels:", "characters": "aeiou"}\n' * 16, encoding="utf-8")
    data = {
        "name": "prompts",
        "train_files": [str(prompts)],
        "tokenizer": {"library": "byte"},
        "seq_length": 32 if bench.small else 256,
        "micro_batch_size": 4,
        "global_batch_size": 4,
    }
    objective = {"name": "grpo", "rewards": ["characters"], "max_completion_length": longest}
    measure(bench, "GRPO 1b", SHAPES["1b"], data=data, objective=objective)


def mixtral(bench: Bench) -> None:
    """A small Mixtral with bounded capacity and dropless, on random tokens."""
    for kind, moe in {"capacity 1.25": {"capacity_factor": 1.25}, "dropless": {"dropless": True}}.items():
        model = {"name": "mixtral", "moe": {"num_experts": 8, "top_k": 2, **moe}}
        measure(bench, f"Mixtral {kind}", _MIXTRAL, model=model)


def _chats(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Return section ``data`` of a run over packed conversations, in micro-batches of one sequence: masks cost the
    square of its length."""
    micro_batch, chats = shape.sized(bench).micro_batch, bench.work / "chats.jsonl"
    _write_chats(chats, tokens=length(bench) * micro_batch * steps_of(bench))
    return {
        "name": "sft-chat",
        "train_files": [str(chats)],
        "packing": True,
        "tokenizer": {"library": "huggingface", "model": "package://nxdt_plugin_sft_chat/data/tokenizer"},
        "seq_length": length(bench),
        "micro_batch_size": 1,
        "global_batch_size": micro_batch,
        "truncation": "keep_start",
    }


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
