"""Many ranks save together and load in any other layout; what fails on one fails on all, and nothing is committed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool
from safetensors import safe_open

from nxdt_core.checkpoint import (
    CheckpointFacts,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_state,
    read_manifest,
    saved_ranks,
    verify,
)
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.checkpoint.write.save import assign, merge
from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.tensor_shards import ShardInfo, TensorSlice
from tests.calls import Call, run_in_turn
from tests.checkpoint.layouts import sharded
from tests.checkpoint.layouts.sharded import SHAPES, STEP, Layout, whole
from tests.sampling import slow

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2 tp2": Layout(dp=2, tp=2),
    "dp2 pp2": Layout(dp=2, pp=2),
    "replicas": Layout(dp=2, replicas=2),
    "dp4": Layout(dp=4),
}


PAIRS = [
    ("dp2 tp2", "one"),
    ("dp2 tp2", "dp2"),
    ("dp2 tp2", "tp2"),
    ("dp2 tp2", "dp2 tp2"),
    ("dp2 tp2", "dp4"),
    ("dp2 tp2", "dp2 pp2"),
    ("one", "dp2 tp2"),
    ("dp4", "tp2"),
    ("pp2", "replicas"),
    ("replicas", "pp2"),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The address of a checkpoint saved in each layout, and by pair what came out wrong on each rank that loaded it.

    Four ranks save and load in the same processes, between the saving and the loading of two.
    """
    uris = {name: str(tmp_path_factory.mktemp("saved")) for name in LAYOUTS}
    saves = {name: Call(layout.world, sharded.save_in, (layout, uris[name])) for name, layout in LAYOUTS.items()}
    loads = {pair: Call(LAYOUTS[pair[1]].world, sharded.load_in, (LAYOUTS[pair[1]], uris[pair[0]])) for pair in PAIRS}
    calls = saves | loads
    run_in_turn({name: call for name, call in saves.items() if call.world < 4})
    wrong = run_in_turn({name: call for name, call in calls.items() if call.world == 4})
    return uris, wrong | run_in_turn({pair: call for pair, call in loads.items() if call.world < 4})


@pytest.fixture(scope="module")
def saved(done):
    """``saved(name)``: the address of a checkpoint saved in that layout."""
    uris, _ = done
    return uris.__getitem__


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_what_any_layout_saved(saved, layout):
    storage = LocalStorage(saved(layout))
    manifest = read_manifest(storage, STEP)
    assert verify(storage, STEP) == []
    model, optimizer = load_model(storage, manifest), load_optimizer(storage, manifest)
    assert model.keys() == SHAPES.keys()
    assert all(torch.equal(model[name], whole(name)) for name in SHAPES)
    assert all(torch.equal(optimizer[f"{name}/exp_avg"], (whole(name) + 0.5) * 2) for name in SHAPES)
    assert len(optimizer) == 2 * len(SHAPES)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
def test_any_layout_loads_into_any_other(done, before, after):
    _, wrong = done
    assert wrong[before, after] == [[]] * LAYOUTS[after].world


def test_each_element_is_written_once_and_every_rank_writes_its_share(saved):
    storage = LocalStorage(saved("dp2 tp2"))
    manifest = read_manifest(storage, STEP)
    written = [0] * 4
    for entry in manifest.tensors["model"].values():
        assert (
            sum(TensorSlice(part.offsets, part.shape).elements for part in entry.parts)
            == TensorSlice.whole(entry.shape).elements
        )
        for part in entry.parts:
            written[int(part.file.split("-")[1])] += entry.part_bytes(part)
    assert sum(written) == sum(whole(name).nbytes for name in SHAPES)
    assert max(written) < 1.6 * min(written)


def test_replicas_share_the_writing(saved):
    manifest = read_manifest(LocalStorage(saved("replicas")), STEP)
    shards = [name for name in manifest.files if name.startswith("model/")]
    assert {name.split("-")[1] for name in shards} == {f"{rank:05d}" for rank in range(4)}


def test_the_safetensors_library_reads_the_shards_of_every_rank(saved):
    storage = LocalStorage(saved("dp2 tp2"))
    manifest = read_manifest(storage, STEP)
    for name in manifest.files:
        if name.endswith(".safetensors"):
            with safe_open(f"{storage.uri}/{manifest.prefix}{name}", framework="pt") as file:
                assert list(file.keys())


def test_every_rank_has_a_state_of_its_own(saved):
    uri = saved("dp2")
    found = RankPool(2, lasting=True).run(sharded.load_states, uri)
    assert [state["rank"] for state in found] == [0, 1]
    assert [state["rng"].tolist() for state in found] == [[0] * 4, [1] * 4]
    manifest = read_manifest(LocalStorage(uri), STEP)
    assert saved_ranks(manifest) == 2
    assert load_state(LocalStorage(uri), manifest, rank=1)["rank"] == 1
    assert manifest.facts == CheckpointFacts(consumed_samples=9)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """By rank that fails, and whether a bug is the reason: the address, and the error of each rank."""
    cases = [(failing, bug) for failing in (0, 1) for bug in (False, True)]
    uris = {case: str(tmp_path_factory.mktemp("failed") / "store") for case in cases}
    found = run_in_turn({case: Call(2, sharded.save_on_full_disk, (Layout(dp=2), uris[case], *case)) for case in cases})
    return {case: (uris[case], found[case]) for case in cases}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("bug", [False, True], ids=["disk full", "bug"])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_nothing(failed, failing, bug):
    uri, errors = failed[failing, bug]
    classes = [name for name, _ in errors]
    assert classes[failing] == ("ZeroDivisionError" if bug else "StorageFull")
    assert classes[1 - failing] == ("CheckpointRankFailed" if bug else "StorageFull")
    assert all(("boom" if bug else "disk 3") in text for _, text in errors)
    if bug:
        assert f"Rank {failing}" in errors[1 - failing][1]
    assert [path for path in Path(uri).rglob("*") if path.is_file()] == []


def test_an_older_save_of_the_step_outlives_a_failed_one(saved, tmp_path):
    uri = str(tmp_path / "store")
    shutil.copytree(saved("tp2"), uri)
    before = read_manifest(LocalStorage(uri), STEP)
    RankPool(2, lasting=True).run(sharded.save_on_full_disk, Layout(dp=2), uri, 1, False)
    assert read_manifest(LocalStorage(uri), STEP) == before
    assert verify(LocalStorage(uri), STEP) == []
    RankPool(2, lasting=True).run(sharded.save_in, Layout(dp=2), uri)
    assert read_manifest(LocalStorage(uri), STEP).attempt != before.attempt
    assert not Path(uri, before.prefix).exists()


def test_state_that_one_rank_cannot_save_stops_all_before_anything_is_written(tmp_path):
    uri = str(tmp_path / "store")
    errors = RankPool(2, lasting=True).run(sharded.save_unsavable, Layout(dp=2), uri, 1)
    assert [name for name, _ in errors] == ["UnsavableState"] * 2
    assert not Path(uri).exists()


def test_ranks_that_do_not_share_a_store_commit_nothing(tmp_path):
    uri = str(tmp_path / "disk")
    errors = RankPool(2, lasting=True).run(sharded.save_apart, Layout(dp=2), uri)
    assert [name for name, _ in errors] == ["CheckpointFilesMissing"] * 2
    assert "all nodes share" in errors[0][1]
    assert list_checkpoints(LocalStorage(f"{uri}-0")) == []


def test_ranks_that_disagree_about_a_tensor_are_told(tmp_path):
    errors = RankPool(2, lasting=True).run(sharded.save_different, str(tmp_path / "store"))
    assert [name for name, _ in errors] == ["TensorStateUnsupported"] * 2
    assert "(2,)" in errors[0][1]
    assert "(3,)" in errors[0][1]


def test_a_damaged_file_that_one_rank_reads_stops_all(saved, tmp_path):
    uri = str(tmp_path / "store")
    shutil.copytree(saved("dp2"), uri)
    manifest = read_manifest(LocalStorage(uri), STEP)
    victim = Path(uri, manifest.prefix, "model/shard-00001-00000.safetensors")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    errors = RankPool(2, lasting=True).run(sharded.load_damaged, Layout(dp=2), uri)
    assert [name for name, _ in errors] == ["CheckpointDamaged"] * 2
    assert all(victim.name in text for _, text in errors)


def test_what_does_not_fit_over_all_ranks_is_told_alike_on_each(saved):
    found = RankPool(2, lasting=True).run(sharded.load_misfits, saved("dp2"))
    assert found[0] == found[1]
    (model, text), (optimizer, other) = found[0]
    assert (model, optimizer) == ("WeightsDoNotFit", "OptimizerStateDoesNotFit")
    assert "1 missing ('other')" in text
    assert "1 unknown ('scalar')" in text, "the two ranks have the other names between them"
    assert "norm: (7,) instead of (8,)" in text
    assert "column" in other


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        slow((4,), ("dp",)),
        slow((2, 2), ("dp", "tp")),
        slow((2, 1, 2), ("pp", "dp", "tp")),
        ((1, 2, 1, 2), ("a", "b", "c", "d")),
    ],
    ids=["1-D", "2-D", "3-D", "4-D"],
)
def test_a_box_says_where_the_elements_of_a_shard_belong(sizes, names):
    assert RankPool(4, lasting=True).run(sharded.boxes_in, sizes, names) == [[]] * 4


def test_partial_sums_are_refused():
    assert RankPool(2, lasting=True).run(sharded.partial_sums)[0][0] == "TensorStateUnsupported"


def held(region: TensorSlice, shape: tuple[int, ...] = (8,), **more) -> ShardInfo:
    return ShardInfo(dtype="float32", shape=shape, region=region, **more)


def test_large_boxes_go_to_those_who_have_written_least():
    listings = [
        {("model", "a"): held(TensorSlice((0,), (8,))), ("model", "b"): held(TensorSlice((0,), (8,)))},
        {("model", "a"): held(TensorSlice((0,), (8,))), ("model", "b"): held(TensorSlice((0,), (8,)))},
        {("model", "b"): held(TensorSlice((0,), (8,)))},
    ]
    chosen = assign(listings)
    assert sorted(len(places) for places in chosen) == [0, 1, 1]
    assert chosen[2] == {("model", "b")}, "who holds least is asked first"


def test_tensors_are_tied_only_where_all_their_holders_say_so():
    one, whole_region = TensorSlice((0,), (8,)), ("model", "user")
    owner = {("model", "owner"): held(one)}
    tied, apart = {**owner, whole_region: held(one, same_as="owner")}, {**owner, whole_region: held(one)}
    part = TensorPart(file="f", start=0, offsets=(0,), shape=(8,))
    both = [tied, tied]
    assert sum(whole_region in places for places in assign(both)) == 0
    index = merge(both, [{("model", "owner"): part}, {}], ["model"])
    assert index["model"]["user"].same_as == "owner"
    mixed = [tied, apart]
    assert sum(whole_region in places for places in assign(mixed)) == 1
    index = merge(mixed, [{("model", "owner"): part, whole_region: part}, {}], ["model"])
    assert index["model"]["user"].same_as is None


def test_a_tensor_that_is_not_all_there_is_refused():
    with raises(TensorStateUnsupported, match="of its 8 elements the ranks hold 4"):
        assign([{("model", "a"): held(TensorSlice((0,), (4,)))}])


def test_the_manifest_of_a_sharded_save_is_plain_json(saved):
    manifest = read_manifest(LocalStorage(saved("dp2 tp2")), STEP)
    path = Path(saved("dp2 tp2"), f"step-{STEP:08d}", "manifest.json")
    table = json.loads(path.read_text())
    assert len(table["tensors"]["model"]["embed"]["parts"]) == 4
    assert manifest.tensors["model"]["embed"].parts[0].offsets == (0, 0)
