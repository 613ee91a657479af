"""What packing chats is worth: how full sequences are, what packing takes, and tokens per second compared with padding.

Claims, for lengths that are skewed as those of chats are (log-normal, most far below a sequence): at least 95 % of the
packed positions hold tokens; packed fine-tuning takes at least 2.5 × the tokens of conversations a second that padded
fine-tuning takes. Both train one model of a Llama's kind by turns, through `train_step`, on the same conversations;
the ratio is the median of the paired ones. Reading is what rendering and tokenising cost before the first step. The
exit status is 1 where a claim fails.

    python benchmarks/data/chat_packing.py [--rounds 5] [--steps 4] [--records 100000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from nxdt_plugin_sft_chat.loader import ChatDataset

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.data.packing import first_fit_decreasing
from nxdt_core.protocols.batch import Batch
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step

SEQUENCE = 512
CHATS = 400
FILLED_WANTED, RATIO_WANTED = 0.95, 2.5


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--records", type=int, default=100_000)
    options = parser.parse_args()
    filled = packing(options.records)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path)
        ratio = training(path, options.rounds, options.steps)
    print(f"wanted at least {FILLED_WANTED:.0%} filled and a ratio of {RATIO_WANTED}")
    return 0 if filled >= FILLED_WANTED and ratio >= RATIO_WANTED else 1


def packing(records: int) -> float:
    """Print how full sequences of 4,096 tokens get, and how long that takes; the share of positions filled."""
    lengths = np.random.default_rng(0).lognormal(5.8, 0.9, records).astype(np.int64).clip(16, 4096)
    begun = time.process_time()
    bins = first_fit_decreasing(lengths, 4096)
    seconds = time.process_time() - begun
    full, alone = (int(lengths.sum()) / (4096 * count) for count in (len(bins), records))
    print(
        f"packing    {records:,} lengths in {seconds:.2f} CPU-s: {full:.1%} of the positions filled, padded {alone:.1%}"
    )
    return full


def write_chats(path: Path) -> None:
    """Conversations of skewed lengths, of the words of the shipped ones."""
    random = np.random.default_rng(1)
    words = ["the", "river", "boat", "was", "slow", "and", "cold", "but", "nobody", "asked", "why", "it", "came"]
    with path.open("w", encoding="utf-8") as file:
        for count in random.lognormal(3.4, 0.8, CHATS).astype(int).clip(2, 180):
            text = [" ".join(random.choice(words, size)) for size in (1 + count // 3, 1 + count)]
            roles = zip(("user", "assistant"), text, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": said} for role, said in roles]}) + "\n")


def training(path: Path, rounds: int, steps: int) -> float:
    """Packed and padded steps by turns; the median ratio of their rates."""
    engine, loops, tokens = None, {}, {}
    for name in ("packed", "padded"):
        config = load(
            "recipe:llama-tiny-sft",
            [
                f"data.train_files=[{path}]",
                "data.validation_fraction=0",
                f"data.packing={str(name == 'packed').lower()}",
                f"data.seq_length={SEQUENCE}",
                "data.micro_batch_size=4",
                "data.global_batch_size=4",
                "model.hidden_size=128",
                "model.ffn_hidden_size=352",
            ],
        )
        if engine is None:
            engine = build.engine(config)
            engine.start()
        begun = time.process_time()
        dataset = cast(ChatDataset, build.dataset(config, build.tokenizer(config)).split("train"))
        report = dataset.report()
        if name == "packed":
            rate = report.tokens.tokens / (time.process_time() - begun)
            print(f"reading    {report.records} conversations at {rate:,.0f} tokens per CPU-second")
        print(f"{name:10} {len(dataset)} sequences of {SEQUENCE}, {report.efficiency or 0:.1%} filled")
        model = initialize_parallel_model(config, engine)
        optimizer = initialize_parallel_optimizer(config, engine, model)
        loops[name] = Loop(config, dataset, model, optimizer)
        loops[name].run(1)
        tokens[name] = []
    for turn in range(rounds):
        for name in loops if turn % 2 == 0 else reversed(loops):
            tokens[name].append(loops[name].run(steps))
    for name, rates in tokens.items():
        print(f"{name:10} {statistics.median(rates):10,.0f} tokens/s of conversations")
    ratios = [packed / padded for packed, padded in zip(tokens["packed"], tokens["padded"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"ratio      {ratio:10.2f} ({min(ratios):.2f} … {max(ratios):.2f})")
    assert engine is not None
    engine.shutdown()
    return ratio


class Loop:
    """Training on one dataset."""

    def __init__(self, config: ResolvedConfig, dataset: ChatDataset, model: object, optimizer: object) -> None:
        self._parts = model, optimizer
        self._objective, self._schedule = build.objective(config), build.schedule(config)
        self._state = TrainState()
        data = config.run.data
        self._batches: Iterator[Sequence[Batch]] = iter(
            GlobalBatchLoader(
                dataset,
                global_batch_size=data.global_batch_size,
                micro_batch_size=data.micro_batch_size,
                seed=1,
                shuffle=True,
            )
        )

    def run(self, steps: int) -> float:
        """Tokens of conversations a second, padding not counted."""
        seen, begun = 0, time.perf_counter()
        model, optimizer = self._parts
        for _ in range(steps):
            batches = next(self._batches)
            seen += sum(int((batch.document_ids >= 0).sum()) for batch in batches if batch.document_ids is not None)
            train_step(
                model,  # type: ignore[arg-type]
                optimizer,  # type: ignore[arg-type]
                batches,
                self._objective,
                self._schedule,
                self._state,
                max_norm=1.0,
            )
        return seen / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
