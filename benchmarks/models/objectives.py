"""Claim: a training step of each objective takes no longer than that of TRL's trainer on the same model and records.

Both train the same Llama from the same weights with AdamW and clipping. TRL's trainer makes the batch and computes the
loss, in a bare loop, with the reference's log-probabilities computed before, as here. Ours packs the records into
rows of `--seq` tokens; TRL pads them to the longest. A step of GRPO includes the answers, drawn and scored. They step
in turn in one process, A B, B A, …; each row gives the CPU's milliseconds of both (medians), the median of the ratios
of one round, and its quartiles. The exit status is 1 where a ratio is above 1.05, the noise that is allowed.

    python benchmarks/models/objectives.py [--only dpo kto] [--rounds 5] [--records 16] [--seq 512] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nxdt_core.config import load
from nxdt_core.data.loader import collate
from nxdt_core.system.paths import resolve_path
from nxdt_core.train import TrainSession, build
from nxdt_core.train.weights.reference import DatasetWithReference, compute_log_probs

TOKENIZER = "package://nxdt_plugin_sft_chat/data/tokenizer"
LR, CLAIM = 1e-4, 1.05
GROUP, LONGEST = 8, 64
"""Answers to a prompt of GRPO, and their tokens."""
Step = Callable[[], object]


def records(count: int) -> list[dict[str, Any]]:
    """Return pairs of answers of 20 to 120 words."""
    draw = random.Random(0)
    words = ["the", "people", "of", "our", "town", "went", "early", "and", "found", "bread", "apples", "before", "noon"]

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(low, high)))

    return [
        {"prompt": f"{text(5, 30)}?", "chosen": f" {text(20, 120)}.", "rejected": f" {text(20, 120)}."}
        for _ in range(count)
    ]


def unpaired(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of ``pairs``, each labelled."""
    return [
        {"prompt": pair["prompt"], "completion": pair[key], "label": key == "chosen"}
        for pair in pairs
        for key in ("chosen", "rejected")
    ]


def completions(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]


def prompts(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"], "characters": "aeiou "} for pair in pairs]


METHODS: dict[str, tuple[str, dict[str, Any], Callable[[Sequence[dict[str, Any]]], Sequence[dict[str, Any]]]]] = {
    "sft": ("sft-chat", {"name": "causal_lm"}, completions),
    "dpo": ("preference", {"name": "dpo"}, list),
    "cpo": ("preference", {"name": "cpo"}, list),
    "orpo": ("preference", {"name": "orpo"}, list),
    "kto": ("unpaired-preference", {"name": "kto"}, unpaired),
    "reward": ("preference", {"name": "reward"}, list),
    "grpo": (
        "prompts",
        {"name": "grpo", "rewards": ["characters"], "num_generations": GROUP, "max_completion_length": LONGEST},
        prompts,
    ),
}
"""By name: our dataset, our objective, and the records it is given."""


def start_weights(directory: Path, seq: int, labels: int) -> Path:
    """Write a Llama of 15M weights, or a classifier with ``labels`` of them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_path(TOKENIZER))
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=seq,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        **({"num_labels": labels} if labels else {}),
    )
    torch.manual_seed(0)
    kind = transformers.LlamaForSequenceClassification if labels else transformers.LlamaForCausalLM
    kind(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def ours(name: str, weights: Path, file: Path, count: int, seq: int) -> Step:
    """Our step, over all records that a step takes."""
    dataset, objective, _ = METHODS[name]
    config = load(
        {
            "name": f"bench-{name}",
            "trainer": {"max_steps": 1000, "accelerator": "cpu"},
            "exp_manager": {"exp_dir": str(file.parent)},
            "data": {
                "name": dataset,
                "train_files": [str(file)],
                "shuffle": False,
                "seq_length": seq,
                "micro_batch_size": count,
                "global_batch_size": count,
                "tokenizer": {"library": "huggingface", "model": TOKENIZER},
                **({"packing": True} if dataset != "prompts" else {}),
            },
            "model": {
                "name": "llama",
                "model_config": str(weights / "config.json"),
                "score_head": name == "reward",
                "optim": {"name": "adamw", "lr": LR, "weight_decay": 0.0, "sched": {"name": "constant"}},
            },
            "objective": objective,
        }
    )
    session = TrainSession(config, weights=weights)
    session.engine.start()
    session.data.prepare()
    session.build_model()
    session.build_optimizer()
    rows = build.dataset(config, session.data.tokenizer).split("train")
    if session.objective.traits.reference:
        found = compute_log_probs(rows, config=config, engine=session.engine, model=session.model)
        rows = DatasetWithReference(rows, found, model="itself")
    batch = collate([rows[index] for index in range(len(rows))])
    return lambda: session.step([batch])


def theirs(name: str, weights: Path, given: Sequence[dict[str, Any]], seq: int, directory: Path) -> Step:
    """TRL's loss in a bare loop, over as many records."""
    import datasets
    import transformers
    import trl
    from trl.experimental import cpo, orpo

    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {"max_length": seq, "completion_only_loss": True}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {"max_length": seq, "precompute_ref_log_probs": True}),
        "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {"max_length": seq}),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {"max_length": seq}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {"max_length": seq, "precompute_ref_log_probs": True}),
        "reward": (trl.RewardTrainer, trl.RewardConfig, {"max_length": seq}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": GROUP, "max_completion_length": LONGEST}),
    }
    kind, settings, more = kinds[name]
    classifies = name == "reward"
    cls = transformers.LlamaForSequenceClassification if classifies else transformers.LlamaForCausalLM
    rows = len(given) * GROUP if name == "grpo" else len(given)
    trainer = kind(
        model=cls.from_pretrained(weights),
        args=settings(
            output_dir=str(directory),
            per_device_train_batch_size=rows,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **more,
        ),
        train_dataset=datasets.Dataset.from_list(list(given)),
        processing_class=transformers.AutoTokenizer.from_pretrained(weights),
        **({"reward_funcs": vowels} if name == "grpo" else {}),
        **({"ref_model": cls.from_pretrained(weights)} if name in ("dpo", "kto") else {}),
    )
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def batches() -> Iterator[Any]:
        while True:
            yield from trainer.get_train_dataloader()

    loader = batches()

    def step() -> None:
        batch = trainer._prepare_inputs(next(loader))
        trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def vowels(completions: Sequence[str], **_: object) -> list[float]:
    """Return the share of vowels and spaces, as our reward ``characters`` counts them."""
    return [sum(letter in "aeiou " for letter in text) / max(1, len(text)) for text in completions]


def by_turns(steps: Sequence[Step], rounds: int) -> list[tuple[float, ...]]:
    """CPU milliseconds of a step of each, by round; one before the first is not counted."""
    found = []
    for number in range(rounds + 1):
        spent = dict.fromkeys(range(len(steps)), 0.0)
        for which in list(spent)[:: 1 if number % 2 else -1]:
            began = time.process_time()
            steps[which]()
            spent[which] = 1000 * (time.process_time() - began)
        found.append(tuple(spent.values()))
    return found[1:]


def main() -> int:
    """Print the table; status 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=16, help="pairs, answers or prompts of a step")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    warnings.simplefilter("ignore")
    print(f"{'':8}{'nxdt ms':>10}{'TRL ms':>10}{'ratio':>8}{'quartiles':>16}")
    failed = False
    for name in asked.only:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            weights = start_weights(folder / "base", asked.seq, int(name == "reward"))
            given = METHODS[name][2](records(asked.records))
            file = folder / "records.jsonl"
            file.write_text("\n".join(map(json.dumps, given)))
            steps = (
                ours(name, weights, file, asked.records, asked.seq),
                theirs(name, weights, given, asked.seq, folder / "trl"),
            )
            times = by_turns(steps, asked.rounds)
        low, ratio, high = statistics.quantiles([own / other for own, other in times], n=4)
        own, other = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:8}{own:10.1f}{other:10.1f}{ratio:8.2f}{f'{low:.2f} to {high:.2f}':>16}", flush=True)
        failed |= ratio > CLAIM
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
