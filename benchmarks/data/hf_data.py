"""Tokens per CPU-second of the loader of saved datasets, compared with torch's DataLoader over the datasets library.

Claim: rows of the length of a sample are loaded at 20 million tokens per CPU-second or more, and no slower than by the
library's own numpy format in a DataLoader, which is what NxD Training does. Rows of many lengths, which are packed here
with documents apart, have no counterpart there and are shown alone, as is a stream of the same rows from Parquet.

    python benchmarks/data/hf_data.py [--rounds 5] [--rows 4000] [--steps 100]

Sequences of 2,048 tokens, batches of 16, shuffled, no workers. All ways are read by turns in one process, from the page
cache; rows give medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import torch
from nxdt_plugin_hf_data.config import HfDataConfig
from nxdt_plugin_hf_data.loader import HfData
from torch.utils.data import DataLoader

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.protocols.dataset import DataContext

SEQ, BATCH, VOCABULARY = 2048, 16, 128_256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        ways = prepared(Path(directory), options.rows)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, batches in ways.items():
                found[name].append(speed(batches(), options.steps))
    print(f"{'':34} million tokens per CPU-second")
    for name, values in found.items():
        print(f"{name:34} {statistics.median(values):8.1f}   ({min(values):.1f} to {max(values):.1f})")
    pairs = zip(found["rows"], found["rows, DataLoader over datasets"], strict=True)
    print(f"ratio of the first two             {statistics.median(ours / theirs for ours, theirs in pairs):8.2f}")


def prepared(directory: Path, rows: int) -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    """Datasets of ``rows`` x 2,048 tokens, and by name what reads them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, rows * SEQ, dtype=np.int32)
    cuts = np.sort(random.choice(np.arange(1, len(tokens)), 4 * rows, replace=False))
    whole = datasets.Dataset.from_dict({"input_ids": list(tokens.reshape(rows, SEQ))})
    parts = datasets.Dataset.from_dict({"input_ids": np.split(tokens, cuts)})
    whole.save_to_disk(directory / "rows")
    parts.save_to_disk(directory / "documents")
    parts.to_parquet(directory / "documents.parquet")
    return {
        "rows": lambda: ours(train_dir=directory / "rows"),
        "rows, DataLoader over datasets": lambda: theirs(directory / "rows"),
        "documents, packed": lambda: ours(train_dir=directory / "documents"),
        "documents, packed from Parquet": lambda: ours(train_dir=directory / "documents.parquet", streaming=True),
    }


def ours(**keys: object) -> Iterator[torch.Tensor]:
    context = DataContext(seq_length=SEQ, seed=1, tokenizer=None, vocab_size=VOCABULARY)
    dataset = HfData(HfDataConfig(**keys), context).split("train")  # type: ignore[arg-type]
    loader = GlobalBatchLoader(dataset, global_batch_size=BATCH, micro_batch_size=BATCH, seed=1, shuffle=True)
    return (batch.input_ids for (batch,) in loader)


def theirs(path: Path) -> Iterator[torch.Tensor]:
    dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    generator = torch.Generator().manual_seed(1)
    while True:
        for batch in DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=generator):
            yield batch["input_ids"]


def speed(batches: Iterator[torch.Tensor], steps: int) -> float:
    """Million tokens per CPU-second over ``steps`` batches, behind a first one."""
    next(batches)
    before = time.process_time()
    tokens = sum(batch.numel() for batch in islice(batches, steps))
    return tokens / (time.process_time() - before) / 1e6


if __name__ == "__main__":
    main()
