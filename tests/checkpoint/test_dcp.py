"""Stock ``dcp.load`` reads what our collective save wrote: a second witness of the format, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from nxdt_core.checkpoint.dcp import NxdtReader
from nxdt_core.testing.ranks import RankPool
from nxdt_core.testing.storage_memory import MemoryStorage
from tests.checkpoint.dcp_ranks import error_in, read_in
from tests.checkpoint.sharded import Layout, save_in


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(tp=2), Layout(dp=2)),
        (Layout(dp=2), Layout(tp=2)),
        (Layout(dp=2, tp=2), Layout(dp=4)),
        (Layout(dp=3), Layout(dp=2, tp=2)),
        (Layout(), Layout(dp=2, tp=2)),
        (Layout(dp=2, tp=2), Layout()),
    ],
    ids=str,
)
def test_a_save_in_one_layout_is_read_in_another(tmp_path: Path, saved: Layout, loaded: Layout) -> None:
    uri = str(tmp_path / "checkpoints")
    RankPool(saved.world).run(save_in, saved, uri)
    assert RankPool(loaded.world).run(read_in, loaded, uri) == [[]] * loaded.world


def test_a_flipped_bit_fails_on_all_ranks_and_names_the_file(tmp_path: Path) -> None:
    uri = tmp_path / "checkpoints"
    RankPool(2).run(save_in, Layout(tp=2), str(uri))
    shard = next(uri.rglob("model/shard-00001-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for text in RankPool(2).run(error_in, Layout(dp=2), str(uri)):
        assert "NXDT-S010" in text
        assert shard.name in text


def test_tied_tensors_dtypes_and_views_on_one_process(save: Any) -> None:
    """Into another dtype, into a tensor whose rows do not lie one after the other, and twice from the same bytes."""
    storage = MemoryStorage()
    shared = torch.arange(12.0).reshape(4, 3)
    manifest = save(storage, 1, model={"a": shared, "b": shared, "scalar": torch.tensor(3)})
    assert manifest.tensors["model"]["b"].same_as == "a"
    state = {
        "a": torch.zeros(4, 3, dtype=torch.float64),
        "b": torch.zeros(3, 4).t(),
        "scalar": torch.tensor(0),
    }
    load(state, storage_reader=NxdtReader(storage, manifest), no_dist=True)
    assert torch.equal(state["a"], shared.double())
    assert torch.equal(state["b"], shared)
    assert torch.equal(state["scalar"], torch.tensor(3))


def test_a_key_that_was_not_saved_is_named(save: Any) -> None:
    storage = MemoryStorage()
    manifest = save(storage, 1)
    with pytest.raises(CheckpointException, match=r"no\.such\.key"):
        load({"no.such.key": torch.zeros(1)}, storage_reader=NxdtReader(storage, manifest), no_dist=True)


def test_nothing_but_tensors_is_offered(save: Any) -> None:
    storage = MemoryStorage()
    manifest = save(storage, 1)
    metadata = NxdtReader(storage, manifest, "state").read_metadata()
    assert set(metadata.state_dict_metadata) == set(manifest.tensors["state"])
    assert metadata.planner_data is None
