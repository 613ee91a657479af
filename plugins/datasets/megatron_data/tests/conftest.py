"""Files as other programs write them: by hand from the published layout, or by Megatron-Core."""

from __future__ import annotations

import importlib.util
import signal
import struct
import sys
import types
from concurrent.futures import Executor, Future
from itertools import accumulate
from pathlib import Path

import numpy as np
import nxdt_plugin_megatron_data.preprocess as preprocess_run
import pytest


class _Here(Executor):
    """In the place of the executor of worker processes: does the work at once, in this process."""

    def __init__(self, _workers, _context, *, initializer, initargs):
        interrupts = signal.getsignal(signal.SIGINT)
        initializer(*initargs)
        signal.signal(signal.SIGINT, interrupts)  # which workers ignore

    def submit(self, function, /, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="session")
def tokenise_here():
    """``tokenise_here(monkeypatch)``: ``nxdt data preprocess`` starts no workers; each takes half a CPU-second."""

    def patched(patch):
        patch.setattr(preprocess_run, "ProcessPoolExecutor", _Here)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # as workers set it

    return patched


@pytest.fixture
def by_hand(tmp_path):
    """Writes a pair from the layout that Megatron-Core's source gives, with nothing of this package."""

    def write(name: str, sequences, *, code: int = 8, borders=None) -> Path:
        dtype = {1: "B", 2: "b", 3: "<h", 4: "<i", 5: "<q", 8: "<H"}[code]
        data = [b"".join(struct.pack(dtype, token) for token in tokens) for tokens in sequences]
        places = [0, *accumulate(len(part) for part in data)][: len(data)]
        borders = range(len(data) + 1) if borders is None else borders
        index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(data), len(borders))
        index += b"".join(struct.pack("<i", len(tokens)) for tokens in sequences)
        index += b"".join(struct.pack("<q", number) for number in (*places, *borders))
        (tmp_path / f"{name}.idx").write_bytes(index)
        (tmp_path / f"{name}.bin").write_bytes(b"".join(data))
        return tmp_path / name

    return write


@pytest.fixture
def sequences():
    """Documents of uneven lengths, an empty one among them; each ends with the token 7."""
    random = np.random.default_rng(5)
    lengths = [*random.integers(1, 40, 60).tolist(), 0]
    return [[*random.integers(8, 250, length - 1).tolist(), 7] if length else [] for length in lengths]


@pytest.fixture(scope="session")
def megatron():
    """``megatron.core.datasets``, where it is installed.

    The package around it imports every model of Megatron's, which takes ten times as long: it is left out.
    """
    found = importlib.util.find_spec("megatron")
    places = [Path(place, "core") for place in (found.submodule_search_locations if found else ())]
    core = next((place for place in places if (place / "datasets").is_dir()), None)
    if core is None:
        pytest.skip("megatron-core is not installed (pip install megatron-core)")
    package = types.ModuleType("megatron.core")
    package.__path__ = [str(core)]
    sys.modules.setdefault("megatron.core", package)
    importlib.import_module("megatron.core.parallel_state")  # before the others, which import each other in a circle
    for name in ("indexed_dataset", "gpt_dataset", "blended_megatron_dataset_builder", "helpers"):
        importlib.import_module(f"megatron.core.datasets.{name}")
    return sys.modules["megatron.core.datasets"]


class Tokenizer:
    """What Megatron-Core asks of one."""

    eod, pad, unique_identifiers, vocab_size = 7, -1, {"class": "test"}, 259


@pytest.fixture
def built_by_megatron(megatron, tmp_path):
    """Returns Megatron-Core's datasets of the three splits of a file, in samples of 16 tokens with the seed 11."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    def build(prefix, split, **options):
        config = GPTDatasetConfig(
            random_seed=11,
            sequence_length=16,
            blend=([str(prefix)], None),
            split=split,
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            **options,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()

    return build
