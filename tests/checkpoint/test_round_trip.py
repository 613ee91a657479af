"""What is saved is what is loaded, and no more is read than was asked for."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from nxdt_testing.errors import raises
from safetensors.torch import load_file

from nxdt_core.checkpoint import CheckpointFacts, load_model, load_optimizer, load_state, read_manifest, verify
from nxdt_core.checkpoint.commit import commit
from nxdt_core.checkpoint.format.digested_files import BLOCK_BYTES, AttemptWriter
from nxdt_core.checkpoint.format.file_names import attempt_prefix
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.shards import list_shards, write_listed
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry
from nxdt_core.checkpoint.read.load import read_tensors
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import TensorNotInCheckpoint
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from tests.checkpoint.memory import MemoryStorage


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, in dtype and shape too."""
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_and_odd_shape_comes_back_bit_for_bit(save: Any, dtype: str) -> None:
    storage = MemoryStorage()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (5 * 7 * 8,), dtype=torch.uint8)
    full = raw.view(getattr(torch, dtype))[: 5 * 7].reshape(5, 7)
    model = {
        "full": full,
        "scalar": full[1, 1],
        "empty": full[:0],
        "transposed": full.t(),
        "strided": full[::2, 1::3],
        "one": full[:1, :1],
    }
    manifest = save(storage, 1, model=model)
    loaded = load_model(storage, manifest)
    assert list(loaded) == list(model)
    assert all(equal(loaded[name], model[name]) for name in model)


def test_not_a_number_and_signed_zero_keep_their_bits(save: Any) -> None:
    odd = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-45])
    storage = MemoryStorage()
    assert equal(load_model(storage, save(storage, 1, model={"odd": odd}))["odd"], odd)


def test_tied_tensors_are_stored_once_and_tied_again(store: LocalStorage, save: Any) -> None:
    embedding = torch.nn.Parameter(torch.randn(64, 64))
    tied = {"embed.weight": embedding, "head.weight": embedding, "view": embedding.detach(), "other": embedding[1:]}
    manifest = save(store, 1, model=tied)
    loaded = load_model(store, manifest)
    assert loaded["embed.weight"] is loaded["head.weight"] is loaded["view"]
    assert all(equal(loaded[name], tied[name].detach()) for name in tied)
    assert manifest.files["model/shard-00000-00000.safetensors"].size_bytes < 2.5 * 64 * 64 * 4
    assert load_model(store, manifest, ["head.weight"]).keys() == {"head.weight"}


def test_equal_shapes_at_one_address_but_other_values_are_not_tied(save: Any) -> None:
    storage, base = MemoryStorage(), torch.arange(16.0)
    model = {"a": base.view(4, 4), "b": base.view(4, 4).t(), "c": base.view(torch.int32).view(4, 4)}
    loaded = load_model(storage, save(storage, 1, model=model))
    assert all(equal(loaded[name], model[name]) for name in model)


def test_optimizer_state_and_facts_come_back(store: LocalStorage, save: Any) -> None:
    facts = CheckpointFacts(
        consumed_samples=7,
        consumed_tokens=2**40,
        config={"run": {"name": "é", "seed": 1}, "list": [1, None, 2.5], "tuple": (1, 2)},
        plugin_fingerprint="abc",
        mesh={"tp": 2, "dp_shard": 4},
        metrics={"loss": math.inf},
        versions={"nxdt-core": "0.1.0"},
    )
    save(store, 3, optimizer={"w/exp_avg": torch.ones(2), "w/step": torch.tensor(3)}, facts=facts)
    manifest = read_manifest(LocalStorage(store.uri), 3)
    assert manifest.facts == facts
    optimizer = load_optimizer(store, manifest)
    assert equal(optimizer["w/exp_avg"], torch.ones(2))
    assert equal(optimizer["w/step"], torch.tensor(3))


def test_empty_sections_are_no_error(store: LocalStorage, save: Any) -> None:
    manifest = save(store, 0, model={}, optimizer={}, state={})
    assert (load_model(store, manifest), load_optimizer(store, manifest), load_state(store, manifest)) == ({}, {}, {})
    assert verify(store, 0) == []


def test_the_safetensors_library_reads_our_shards(store: LocalStorage, save: Any) -> None:
    model = {"w": torch.randn(3, 5), "flag": torch.tensor([True]), "half": torch.randn(3).half(), "n": torch.tensor(7)}
    manifest = save(store, 1, model=model)
    theirs = load_file(f"{store.uri}/{manifest.prefix}model/shard-00000-00000.safetensors")
    assert theirs.keys() == model.keys()
    assert all(equal(theirs[name], model[name]) for name in model)


def test_tensors_are_aligned_to_their_elements(save: Any) -> None:
    """Readers that map a shard into memory need it."""
    names = {"bool": 3, "bfloat16": 5, "int64": 1, "float32": 7, "uint8": 1, "float64": 1}
    model = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in names.items()}
    for name, entry in save(MemoryStorage(), 1, model=model).tensors["model"].items():
        assert entry.parts[0].start % ITEM_BYTES[name] == 0


def test_tensors_larger_than_a_block_and_many_shards(store: LocalStorage) -> None:
    model = {f"w{i}": torch.randn(BLOCK_BYTES // 8 + i) for i in range(7)}
    writer = AttemptWriter(store, attempt_prefix(1, "x"))
    _, shards = list_shards("model", model)
    read = lambda keys: (model[name] for _, name in keys)  # noqa: E731
    parts = write_listed(writer, shards, read, rank=0, shard_bytes=BLOCK_BYTES + 100)
    index = {name: TensorEntry(dtype="float32", shape=part.shape, parts=(part,)) for (_, name), part in parts.items()}
    manifest = _commit(store, writer, index)
    assert len(manifest.files) == 4
    loaded = load_model(store, manifest)
    assert all(equal(loaded[name], model[name]) for name in model)
    assert verify(store, 1) == []


def test_only_the_blocks_of_asked_for_tensors_and_of_the_header_are_read(save: Any) -> None:
    class Counting(MemoryStorage):
        read = 0

        @contextmanager
        def open_read(self, key: str, start: int = 0, length: int | None = None):
            if key.endswith(".safetensors"):
                assert length is not None
                self.read += length
            with super().open_read(key, start, length) as stream:
                yield stream

    storage = Counting()
    big = torch.randn(5 * BLOCK_BYTES)
    manifest = save(storage, 1, model={"a": torch.ones(8), "big": big, "z": torch.zeros(8)})
    assert equal(load_model(storage, manifest, ["z"])["z"], torch.zeros(8))
    assert storage.read <= 2 * BLOCK_BYTES
    storage.read = 0
    assert load_model(storage, manifest, ["z", "a"]).keys() == {"a", "z"}
    assert storage.read <= 3 * BLOCK_BYTES
    with raises(TensorNotInCheckpoint, match="nowhere"):
        load_model(storage, manifest, ["nowhere"])


def test_a_tensor_in_parts_of_several_ranks_is_put_together() -> None:
    storage = MemoryStorage()
    whole = torch.randn(6, 5)
    writer = AttemptWriter(storage, attempt_prefix(1, "x"))
    regions = (TensorSlice((0, 0), (4, 3)), TensorSlice((0, 3), (4, 2)), TensorSlice((4, 0), (2, 5)))
    parts = []
    for rank, region in enumerate(regions):
        shard = LocalShard(whole[region.within(TensorSlice.whole((6, 5)))], (6, 5), region)
        _, shards = list_shards("model", {"w": shard})
        parts.append(write_listed(writer, shards, lambda _, t=shard.tensor: [t], rank=rank)["model", "w"])
    entry = TensorEntry(dtype="float32", shape=(6, 5), parts=tuple(parts))
    manifest = _commit(storage, writer, {"w": entry})
    assert manifest.tensors["model"]["w"] == entry
    assert equal(read_tensors(storage, manifest, "model")["w"], whole)


def _commit(storage: Any, writer: AttemptWriter, index: dict[str, TensorEntry]) -> Manifest:
    manifest = Manifest(
        step=1,
        attempt="x",
        created="2026-11-22T00:00:00+00:00",
        facts=CheckpointFacts(),
        files=writer.entries,
        tensors={"model": index},
    )
    commit(storage, manifest, None)
    return read_manifest(storage, 1)
