"""What two checkpoints do not share: every bit, in any layouts, through little memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import CheckpointFacts, read_manifest
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint import diff as difference
from nxdt_core.cli.checkpoint.diff import Difference, Side, compare_checkpoints
from nxdt_core.errors.checkpoints import CheckpointDamaged
from tests.checkpoint.layouts.sharded import STEP, Layout, save_in
from tests.checkpoint.memory import MemoryStorage
from tests.checkpoint.saving import save_checkpoint


def side(model: Mapping[str, torch.Tensor], *, config: Any = None, state: Any = None, **more: Any) -> Side:
    """A checkpoint of ``model``."""
    storage = MemoryStorage()
    manifest = save_checkpoint(
        storage,
        step=1,
        model=model,
        optimizer=more.get("optimizer", {}),
        state=state or {},
        facts=CheckpointFacts(config=config or {}, consumed_samples=more.get("samples", 0)),
    )
    return Side(storage, manifest)


def models(first: torch.Tensor, second: torch.Tensor) -> Difference:
    return compare_checkpoints(side({"w": first}), side({"w": second}))


def test_equal_ones_differ_in_nothing_whatever_their_facts() -> None:
    model = {"w": torch.randn(5, 3), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.0)}
    found = compare_checkpoints(side(model, samples=1), side(model, samples=2))
    assert found.is_empty
    assert found.tensors_compared == 3


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_one_flipped_bit_is_found_in_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    data = torch.zeros(6 * ITEM_BYTES[name], dtype=torch.uint8)
    changed = data.clone()
    changed[3 * ITEM_BYTES[name]] = 1
    found = models(data.view(dtype).reshape(2, 3), changed.view(dtype).reshape(2, 3))
    assert [each.elements_differing for each in found.tensors] == [1]
    assert models(data.view(dtype), data.view(dtype)).is_empty


def test_numbers_are_those_of_the_definition() -> None:
    first = torch.randn(50, 7)
    second = first.clone()
    second[3] += 0.5
    second[20, 2] -= 2.0
    (found,) = models(first, second).tensors
    distance = (first - second).double()
    assert found.elements_differing == 8
    assert found.max_abs_difference == pytest.approx(float(distance.abs().max()))
    assert found.relative_norm == pytest.approx(float(distance.norm() / first.double().norm()))


def test_what_is_no_number_is_told_and_counts_only_where_it_differs() -> None:
    first = torch.tensor([1.0, math.nan, math.inf, 0.0])
    assert models(first, first.clone()).is_empty
    (found,) = models(first, torch.tensor([1.0, math.nan, math.inf, math.nan])).tensors
    assert found.elements_differing == 1
    assert math.isnan(found.max_abs_difference or 0.0)
    (found,) = models(torch.zeros(2), torch.tensor([0.0, -0.0])).tensors
    assert (found.elements_differing, found.max_abs_difference, found.relative_norm) == (1, 0.0, 0.0)
    (found,) = models(torch.zeros(2), torch.tensor([0.0, 1.0])).tensors
    assert found.relative_norm == math.inf


def test_other_dtypes_and_shapes_are_differences() -> None:
    (found,) = models(torch.ones(3), torch.tensor([1.0, 1.0, 2.0]).bfloat16()).tensors
    assert found.dtypes == ("float32", "bfloat16")
    assert (found.elements_differing, found.max_abs_difference) == (1, 1.0)
    (found,) = models(torch.ones(3), torch.ones(3).bfloat16()).tensors
    assert found.elements_differing == 0
    (found,) = models(torch.ones(2, 3), torch.ones(3, 2)).tensors
    assert found.shapes == ((2, 3), (3, 2))
    assert found.elements_differing is None


def test_names_in_one_only() -> None:
    first = side({"a": torch.ones(1), "b": torch.ones(1)}, optimizer={"a/m": torch.ones(1)})
    found = compare_checkpoints(first, side({"b": torch.ones(1), "c": torch.ones(1)}))
    assert found.only_in == (("model/a", "optim/a/m"), ("model/c",))
    assert found.tensors_compared == 1


def test_tied_tensors_are_compared_by_their_values() -> None:
    shared = torch.arange(4.0)
    tied = side({"a": shared, "b": shared})
    assert compare_checkpoints(tied, side({"a": shared, "b": shared.clone()})).is_empty
    found = compare_checkpoints(tied, side({"a": shared, "b": shared + 1}))
    assert [each.name for each in found.tensors] == ["b"]


def test_values_of_state_and_configuration() -> None:
    first = side({}, config={"a": {"b": 1, "c": [1, 2]}, "d": None}, state={"x": (1, {"y": 2}), "z": True})
    second = side({}, config={"a": {"b": 1.0, "c": [1, 3]}, "e": 1}, state={"x": (1, {"y": 3}), "z": True})
    found = compare_checkpoints(first, second).values
    assert [(each.where, each.path, each.values, each.only_in) for each in found] == [
        ("state/rank-00000.json", "x.items.1.y", (2, 3), None),
        ("config", "a.b", (1, 1.0), None),
        ("config", "a.c", ([1, 2], [1, 3]), None),
        ("config", "d", (None, None), 0),
        ("config", "e", (None, 1), 1),
    ]


def test_tensors_of_the_state_are_compared() -> None:
    found = compare_checkpoints(side({}, state={"rng": torch.zeros(2)}), side({}, state={"rng": torch.ones(2)}))
    assert [(each.section, each.elements_differing) for each in found.tensors] == [("state", 2)]


def test_only_what_was_asked_for_is_read() -> None:
    first, second = side({"w": torch.ones(2)}, config={"a": 1}), side({"w": torch.zeros(2)}, config={"a": 2})
    assert compare_checkpoints(first, second, subjects=["state", "optim"]).is_empty
    assert not compare_checkpoints(first, second, subjects=["config"]).tensors
    assert not compare_checkpoints(first, second, subjects=["model"]).values


def test_large_tensors_pass_through_batches_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same whatever the size of batches and chunks, and no read is larger than a batch."""
    torch.manual_seed(0)
    first = {"w": torch.randn(100, 16), "v": torch.randn(999), "s": torch.tensor(1.0)}
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["w"][57, 3] += 1.0
    second["v"][998] += 1.0
    expected = compare_checkpoints(side(first), side(second))
    largest = 0
    empty = torch.empty

    def watched(*arguments: Any, **more: Any) -> torch.Tensor:
        nonlocal largest
        tensor = empty(*arguments, **more)
        largest = max(largest, tensor.nbytes)
        return tensor

    monkeypatch.setattr(difference, "_BATCH_BYTES", 1024)
    monkeypatch.setattr(difference, "_CHUNK_ELEMENTS", 7)
    monkeypatch.setattr(torch, "empty", watched)
    seen: list[int] = []
    found = compare_checkpoints(side(first), side(second), progress=seen.append)
    assert [(each.name, each.elements_differing, each.max_abs_difference) for each in found.tensors] == [
        (each.name, each.elements_differing, each.max_abs_difference) for each in expected.tensors
    ]
    assert {each.name for each in found.tensors} == {"w", "v"}
    assert largest <= 1024
    assert sum(seen) == sum(tensor.nbytes for tensor in first.values())


def test_a_damaged_side_is_named() -> None:
    first, second = side({"w": torch.ones(100)}), side({"w": torch.ones(100)})
    storage = second.storage
    assert isinstance(storage, MemoryStorage)
    (key,) = (key for key in storage.objects if key.endswith(".safetensors"))
    data = bytearray(storage.objects[key][0])
    data[-1] ^= 1
    storage.objects[key] = (bytes(data), 0.0)
    with pytest.raises(CheckpointDamaged, match=key):
        compare_checkpoints(first, second)


def test_layouts_do_not_matter(tmp_path: Any) -> None:
    """Two ranks by columns and rows against one process: the same tensors, other shares of the files."""
    sharded, alone = str(tmp_path / "sharded"), str(tmp_path / "alone")
    RankPool(2).run(save_in, Layout(tp=2), sharded)
    RankPool(1).run(save_in, Layout(), alone)
    sides = [Side(LocalStorage(uri), read_manifest(LocalStorage(uri), STEP)) for uri in (sharded, alone)]
    found = compare_checkpoints(sides[0], sides[1], subjects=["model", "optim"])
    assert found.is_empty
    assert found.tensors_compared > 10
    found = compare_checkpoints(sides[0], sides[1])
    assert found.only_in == (("state/rank-00001/rng",), ())
