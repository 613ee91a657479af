"""Megatron's indexed files: tokens that the loader gives a CPU-second, the index of ten million documents, a resume.

Claims: batches of 16 samples of 2,048 tokens at 20 million tokens per CPU-second or more; the index of 10^7 documents
built in under 10 s; the first batch behind sample 10^7 in under a second, the check of the data's fingerprint included.
Where ``megatron-core`` is installed, its ``GPTDataset`` gives the same samples in turns with ours. The exit status is 1
where a claim fails.

    python benchmarks/data/megatron_data.py --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nxdt_plugin_megatron_data.config import MegatronDataConfig
from nxdt_plugin_megatron_data.indexed_files import bin_path, dtype_for, idx_path, write_documents, write_index
from nxdt_plugin_megatron_data.loader import MegatronData, Windows

from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.protocols.dataset import DataContext

LENGTH, BATCH, VOCABULARY = 2048, 16, 50257
DOCUMENTS = 10**7
TOKENS_WANTED, INDEX_BUDGET_S, SEEK_BUDGET_S = 20e6, 10.0, 1.0
BATCHES = 200
"""In one timing."""


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        loaders: dict[str, Callable[[], float]] = {}
        prefix = _corpus(where)
        loaders["nxdt"] = _ours(prefix)
        loaders["nxdt, documents apart"] = _ours(prefix, reset_attention_mask=True, reset_position_ids=True)
        if importlib.util.find_spec("megatron") is not None:
            loaders["Megatron-Core"] = _megatron(prefix, where)
        else:
            print("Megatron-Core: not installed (pip install megatron-core)")
        rates = [{name: measure() for name, measure in loaders.items()} for _ in range(rounds)]
        for name in loaders:
            found = sorted(row[name] for row in rates)
            spread = f"{found[0] / 1e6:.1f} to {found[-1] / 1e6:.1f}"
            print(f"{name}: {statistics.median(found) / 1e6:.1f} M tokens/CPU-s ({spread})")
        index_s, seek_s = _many_documents(where)
    print(f"index of 10^7 documents: {index_s:.2f} CPU-s, budget {INDEX_BUDGET_S:.0f} s")
    print(f"first batch behind sample 10^7: {seek_s:.3f} s, budget {SEEK_BUDGET_S:.0f} s")
    rate = statistics.median(row["nxdt"] for row in rates)
    return 0 if rate >= TOKENS_WANTED and index_s <= INDEX_BUDGET_S and seek_s <= SEEK_BUDGET_S else 1


def _corpus(where: Path) -> Path:
    """91,000 documents of 50 to 1,200 tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(50, 1200, 91_000).tolist()
    documents = ([random.integers(0, VOCABULARY, length, dtype=np.uint16)] for length in lengths)
    write_documents(where / "corpus", dtype_for(VOCABULARY), documents)
    return where / "corpus"


def _loader(prefix: Path, seq_length: int = LENGTH, **keys: Any) -> GlobalBatchLoader:
    context = DataContext(seq_length=seq_length, seed=1, tokenizer=None, vocab_size=VOCABULARY)
    dataset = MegatronData(MegatronDataConfig(data_prefix=prefix, **keys), context).split("train")
    assert dataset is not None
    return GlobalBatchLoader(dataset, global_batch_size=BATCH, micro_batch_size=BATCH, seed=1, shuffle=True)


def _ours(prefix: Path, **keys: Any) -> Callable[[], float]:
    batches = iter(_loader(prefix, **keys))

    def measure() -> float:
        begin = time.process_time()
        for _ in islice(batches, BATCHES):
            pass
        return BATCHES * BATCH * LENGTH / (time.process_time() - begin)

    return measure


def _megatron(prefix: Path, where: Path) -> Callable[[], float]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, -1, VOCABULARY, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(where / "megatron"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]
    numbers = iter(range(10**9))

    def measure() -> float:
        begin = time.process_time()
        for _ in range(BATCHES):
            rows = [dataset[next(numbers) % len(dataset)] for _ in range(BATCH)]
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                torch.stack([row[key] for row in rows])
        return BATCHES * BATCH * LENGTH / (time.process_time() - begin)

    return measure


def _many_documents(where: Path) -> tuple[float, float]:
    """CPU-seconds of an index of 10^7 documents, and seconds until the first batch behind sample 10^7."""
    lengths = np.random.default_rng(2).integers(20, 200, DOCUMENTS).astype(np.int32)
    prefix = where / "many"
    write_index(idx_path(prefix), dtype_for(VOCABULARY), lengths, np.arange(DOCUMENTS + 1, dtype=np.int64))
    bin_path(prefix).touch()
    os.truncate(bin_path(prefix), int(lengths.sum(dtype=np.int64)) * 2)  # a hole: zeros that take no room
    begin = time.process_time()
    Windows(seq_length=LENGTH).build(lengths, range(DOCUMENTS), seed=1)
    index_s = time.process_time() - begin
    loader = _loader(prefix, seq_length=64)
    state = {**loader.state_dict(), "consumed_samples": 10**7}
    begin = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return index_s, time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
