"""Which tensors are stored once: those that the plan ties, and never two that have no address."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager, load_model, read_manifest, verify
from nxdt_core.checkpoint.format.manifest import encode_manifest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import CheckpointDamaged, SaveLacksElements, TensorStateUnsupported
from nxdt_core.train import TrainSession
from tests.checkpoint.memory import MemoryStorage
from tests.checkpoint.saving import save_checkpoint

TINY = ("model.num_layers=2", "data.seq_length=16", "trainer.max_steps=2", "exp_manager.exp_dir=null")
TIED = "model.share_embeddings_and_output_weights=true"
PIPELINE = ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2")


def save_lazy(root: str, in_background: bool) -> list[bool]:
    """Save two tensors of torch's lazy device, which have the address 0, and say which come back."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    host = {"first": torch.randn(3, 2), "second": torch.randn(3, 2)}
    model = {name: tensor.to("lazy") for name, tensor in host.items()}
    assert [tensor.data_ptr() for tensor in model.values()] == [0, 0]
    storage = LocalStorage(root)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": {f"{name}/exp_avg": tensor * 2 for name, tensor in model.items()},
        "state": {},
        "facts": CheckpointFacts(elements=12),
    }
    if in_background:
        manager = CheckpointManager(storage)
        manager.save(step=1, **parts)
        manager.wait()
    else:
        save_checkpoint(storage, step=1, **parts)
    loaded = load_model(storage, read_manifest(storage, 1))
    return [torch.equal(loaded[name], tensor) for name, tensor in host.items()]


@pytest.mark.parametrize("in_background", [False, True])
def test_tensors_without_an_address_are_stored_each(tmp_path: Path, in_background: bool) -> None:
    assert RankPool(1).run(save_lazy, str(tmp_path), in_background) == [[True, True]]


def test_ties_of_a_plan_decide_and_addresses_do_not(save: Any) -> None:
    one, storage = torch.randn(3, 2), MemoryStorage()
    equal = {"owner": one, "user": one.clone(), "view": one.view(3, 2)}
    index = save(storage, 1, model=equal, ties={"user": "owner"}).tensors["model"]
    assert {name: entry.same_as for name, entry in index.items()} == {"owner": None, "user": "owner", "view": None}
    loaded = load_model(storage, read_manifest(storage, 1))
    assert all(torch.equal(loaded[name], one) for name in equal)


def test_a_user_whose_owner_is_elsewhere_is_stored(save: Any) -> None:
    manifest = save(MemoryStorage(), 1, model={"user": torch.ones(2)}, ties={"user": "owner"})
    assert manifest.tensors["model"]["user"].parts


def test_a_tie_of_tensors_with_other_shapes_is_refused(save: Any) -> None:
    model = {"owner": torch.ones(2), "user": torch.ones(3)}
    with raises(TensorStateUnsupported, match="tied to owner of another shape"):
        save(MemoryStorage(), 1, model=model, ties={"user": "owner"})


def test_a_tensor_whose_memory_was_freed_is_refused(save: Any) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with raises(TensorStateUnsupported, match="memory was freed"):
        save(MemoryStorage(), 1, model={"w": freed})


def test_a_checkpoint_that_lacks_elements_of_the_model_is_damaged(tmp_path: Path, save: Any) -> None:
    store = LocalStorage(str(tmp_path))
    manifest = save(store, 1, model={"w": torch.ones(12)}, facts=CheckpointFacts(elements=12))
    assert verify(store, 1) == []
    lacking = dataclasses.replace(manifest, facts=CheckpointFacts(elements=13))
    next(tmp_path.rglob("manifest.json")).write_bytes(encode_manifest(lacking))
    assert "it stores 12 elements of a model that has 13" in verify(store, 1)[0]
    with pytest.raises(CheckpointDamaged, match="NXDT-S010"):
        read_manifest(store, 1)


def test_a_save_that_lacks_elements_of_the_model_is_not_committed(save: Any) -> None:
    storage = MemoryStorage()
    with raises(SaveLacksElements, match="would store 12 elements of a model that has 13"):
        save(storage, 1, model={"w": torch.ones(12)}, facts=CheckpointFacts(elements=13))
    assert list(storage.list()) == []


def save_run(root: str, *overrides: str) -> int:
    """Save an untrained run and return the number of elements that its manifest records."""
    with TrainSession.load("recipe:llama-tiny", [*TINY, f"checkpoint.uri={root}", *overrides]) as session:
        return session.save().facts.elements


@pytest.mark.parametrize(
    "overrides",
    [
        (TIED,),
        (),
        (*PIPELINE, TIED),
    ],
    ids=["tied", "untied", "tied ends of a pipeline"],
)
def test_a_run_records_how_many_elements_its_model_has(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    counted = RankPool(2 if PIPELINE[0] in overrides else 1, lasting=True).run(save_run, str(tmp_path), *overrides)
    manifest = read_manifest(LocalStorage(str(tmp_path)), 0)
    loaded = load_model(LocalStorage(str(tmp_path)), manifest)
    assert set(counted) == {manifest.facts.elements} == {sum(tensor.numel() for tensor in loaded.values())}
