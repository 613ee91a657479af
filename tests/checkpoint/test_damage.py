"""Whatever happens to the bytes of a checkpoint is noticed, the file is named, and nothing of it is executed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from nxdt_core.checkpoint import (
    CheckpointFacts,
    latest,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_state,
    read_manifest,
    verify,
)
from nxdt_core.checkpoint.format.digested_files import BLOCK_BYTES, BlockDigests
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.format.manifest import Manifest, decode_manifest, digest, encode_manifest
from nxdt_core.checkpoint.read.status import find_problems
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.checkpoint.write.retention import delete_step
from nxdt_core.cli import main
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotFound, CheckpointTooNew, StorageError
from tests.sampling import takes_all

FILES = (
    "manifest.json",
    "model/shard-00000-00000.safetensors",
    "model/shard-00000-00000.safetensors.digests",
    "optim/shard-00000-00000.safetensors",
    "optim/shard-00000-00000.safetensors.digests",
    "state/shard-00000-00000.safetensors",
    "state/shard-00000-00000.safetensors.digests",
    "state/rank-00000.json",
    "state/rank-00000.json.digests",
)


def load_all(store: LocalStorage, step: int) -> tuple[Any, Any, Any]:
    manifest = read_manifest(store, step)
    return load_model(store, manifest), load_optimizer(store, manifest), load_state(store, manifest)


def path_of(store: LocalStorage, manifest: Manifest, name: str) -> Path:
    return Path(store.uri) / (manifest_key(manifest.step) if name == "manifest.json" else manifest.prefix + name)


def test_the_list_of_files_is_complete(store: LocalStorage, save: Any) -> None:
    manifest = save(store, 1)
    assert {path_of(store, manifest, name) for name in FILES} == {
        path for path in Path(store.uri).rglob("*") if path.is_file()
    }


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(
    store: LocalStorage, save: Any, name: str, pytestconfig: pytest.Config
) -> None:
    save(store, 1)
    manifest = save(store, 2)
    path = path_of(store, manifest, name)
    good = path.read_bytes()
    last = len(good) * 8 - 1
    for bit in {0, 5, last, *random.Random(name).sample(range(last), 60 if takes_all(pytestconfig) else 5)}:
        path.write_bytes(flip(good, bit))
        problems = verify(store, 2)
        assert problems, f"bit {bit} of {name} flips unnoticed"
        assert str(path) in problems[0]
        lines: list[str] = []
        found = latest(store, warn=lines.append)
        assert found is not None
        assert found.step == 1
        assert len(lines) == 1
        assert str(path) in lines[0]
    path.write_bytes(good)
    assert verify(store, 2) == []


def test_loading_finds_a_flipped_bit_in_every_region(
    store: LocalStorage, save: Any, pytestconfig: pytest.Config
) -> None:
    """A length, a header, its padding, tensors of two blocks, digests, JSON: whatever is drawn."""
    manifest = save(store, 1, model={"big": torch.randn(BLOCK_BYTES // 4 + 3), "é": torch.ones(3, dtype=torch.bool)})
    paths = [path_of(store, manifest, name) for name in FILES]
    header = 8 + int.from_bytes(paths[1].read_bytes()[:8], "little")
    assert paths[1].read_bytes()[header - 1 : header] == b" "  # padding is there

    def check(path: Path, bit: int) -> None:
        flip_in_place(path, bit)
        try:
            with pytest.raises(StorageError) as caught:
                load_all(store, 1)
            assert str(path) in str(caught.value)
            assert str(path) in verify(store, 1)[0]
        finally:
            flip_in_place(path, bit)

    @seed(20261121)
    @settings(max_examples=150 if takes_all(pytestconfig) else 15, deadline=None, database=None)
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(paths))
        check(path, data.draw(st.integers(0, path.stat().st_size * 8 - 1)))

    drawn()
    for byte in (0, 7, 8, header - 1, header, BLOCK_BYTES - 1, BLOCK_BYTES, paths[1].stat().st_size - 1):
        check(paths[1], byte * 8)


def flip_in_place(path: Path, bit: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.parametrize("name", [name for name in FILES if "safetensors" not in name or "shard" in name])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: None,
        lambda data: flip(data, 77),
    ],
    ids=["truncated", "emptied", "extended", "removed", "flipped"],
)
def test_loading_raises_the_damage_of_the_file(
    store: LocalStorage, save: Any, name: str, damage: Callable[[bytes], bytes | None]
) -> None:
    manifest = save(store, 1)
    path = path_of(store, manifest, name)
    changed = damage(path.read_bytes())
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    with pytest.raises(StorageError) as caught:
        load_all(store, 1)
    assert str(path) in str(caught.value) or name == "manifest.json"
    assert caught.value.code in ("NXDT-S010", "NXDT-S011")
    assert verify(store, 1)
    assert latest(store, warn=lambda line: None) is None


def test_cheap_status_sees_what_names_and_sizes_show(store: LocalStorage, save: Any) -> None:
    for step in range(1, 7):
        save(store, step)
    prefixes = {step: read_manifest(store, step).prefix for step in range(1, 7)}
    shard = "model/shard-00000-00000.safetensors"
    root = Path(store.uri)
    (root / prefixes[2] / shard).unlink()
    (root / prefixes[3] / f"{shard}.digests").write_bytes(b"")
    (root / manifest_key(4)).write_bytes(b"{}")
    (root / manifest_key(5)).unlink()
    states = {status.step: status for status in list_checkpoints(store)}
    assert [states[step].state for step in range(1, 7)] == [
        "committed", "damaged", "damaged", "damaged", "unfinished", "committed",
    ]  # fmt: skip
    assert states[2].problem == f"{root}/{prefixes[2]}{shard}: it is missing"
    assert "manifest.json" in states[4].problem
    assert states[1].size_bytes == sum(path.stat().st_size for path in (root / "step-00000001").rglob("*.*"))
    assert verify(store, 2, deep=False) == [states[2].problem]
    assert verify(store, 6, deep=False) == []


@pytest.mark.parametrize("ends", [("",), ("", ".digests")], ids=["file", "file and digests"])
@pytest.mark.parametrize("name", ["model/shard-00000-00000.safetensors", "state/rank-00000.json"])
def test_a_file_of_another_step_is_damage(store: LocalStorage, save: Any, name: str, ends: tuple[str, ...]) -> None:
    """As a copy that mixes up two checkpoints leaves it; the file itself is sound."""
    other, manifest = save(store, 1), save(store, 2)
    for end in ends:
        shutil.copyfile(path_of(store, other, name + end), path_of(store, manifest, name + end))
    assert str(path_of(store, manifest, name)) in verify(store, 2)[0]
    with pytest.raises(CheckpointDamaged, match=name):
        load_all(store, 2)


def test_damage_in_another_block_does_not_hinder_a_partial_load(store: LocalStorage, save: Any) -> None:
    manifest = save(store, 1, model={"big": torch.randn(BLOCK_BYTES), "z": torch.ones(3)})
    path = path_of(store, manifest, FILES[1])
    data = path.read_bytes()
    path.write_bytes(flip(data, 8 * (3 * BLOCK_BYTES // 2)))
    assert torch.equal(load_model(store, manifest, ["z"])["z"], torch.ones(3))
    with pytest.raises(CheckpointDamaged, match="bytes 8388608 to 16777216"):
        load_model(store, manifest)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", FILES)
def test_pickles_in_place_of_files_execute_nothing(
    store: LocalStorage, save: Any, tmp_path: Path, name: str, protocol: int
) -> None:
    marker = tmp_path / "executed"
    path_of(store, save(store, 1), name).write_bytes(pickle.dumps(Payload(marker), protocol))
    list_checkpoints(store)
    assert verify(store, 1)
    with pytest.raises(CheckpointDamaged):
        load_all(store, 1)
    assert not marker.exists()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(("safetensors", "rank-00000.json"))])
def test_pickles_with_forged_digests_execute_nothing(store: LocalStorage, save: Any, tmp_path: Path, name: str) -> None:
    """A digest detects accidents only; against forgers it helps that nothing can be executed."""
    marker = tmp_path / "executed"
    manifest = save(store, 1)
    forge(store, manifest, name, pickle.dumps(Payload(marker), 0))
    assert [problem for problem in verify(store, 1) if name in problem]
    with pytest.raises(CheckpointDamaged, match=name):
        load_all(store, 1)
    assert not marker.exists()


def forge(store: LocalStorage, manifest: Manifest, name: str, data: bytes) -> None:
    """Put ``data`` in the place of a file, with digests that fit."""
    digests = BlockDigests(size_bytes=len(data), blocks=(digest(data).partition(":")[2],)).encode()
    path = path_of(store, manifest, name)
    path.write_bytes(data)
    path.with_name(f"{path.name}.digests").write_bytes(digests)
    entry = dataclasses.replace(
        manifest.files[name], size_bytes=len(data), digests_bytes=len(digests), digests_digest=digest(digests)
    )
    forged = dataclasses.replace(manifest, files={**manifest.files, name: entry})
    path_of(store, manifest, "manifest.json").write_bytes(encode_manifest(forged))


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "../../elsewhere"},
        {"files": {}},
        {"files": {"../../secret": {"size_bytes": 1, "digests_bytes": 1, "digests_digest": "xxh3_128:0"}}},
        {"files": []},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [2**40], "parts": [[FILES[1], 0]]}}}},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [1], "parts": [["../../secret", 0]]}}}},
        {
            "tensors": {
                "model": {
                    "w": {"dtype": "float32", "shape": [4], "parts": [[FILES[1], 0, [3], [2]], [FILES[1], 8, [0], [2]]]}
                }
            }
        },
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [-1], "parts": [[FILES[1], 0]]}}}},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [0, 2**62], "parts": [[FILES[1], 0]]}}}},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [4], "parts": []}}}},
        {"tensors": {"model": {"w": {"dtype": "os.system", "shape": [1], "parts": [[FILES[1], 0]]}}}},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [1], "same_as": "w"}}}},
        {"tensors": {"model": {"w": {"dtype": "float32", "shape": [1], "same_as": "no"}}}},
        {"tensors": None},
        {"step": 2},
        {"config": {"$": "tensor", "name": "x"}},
    ],
)
def test_forged_manifests_end_in_an_error_for_the_user(store: LocalStorage, save: Any, change: dict[str, Any]) -> None:
    manifest = save(store, 1)
    path = path_of(store, manifest, "manifest.json")
    path.write_bytes(signed({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(StorageError):
        load_all(store, 1)


def test_no_change_of_a_manifest_goes_unnoticed(store: LocalStorage, save: Any) -> None:
    """Every bit, also of those whose change leaves the JSON equal: escapes, exponents, white space."""
    manifest = save(store, 1, facts=CheckpointFacts(config={"é": 1e-30}))
    data = encode_manifest(manifest)
    assert decode_manifest(data, step=1, where="m") == manifest
    for changed in (data + b" ", data.replace(b":", b": ", 1), *(flip(data, bit) for bit in range(len(data) * 8))):
        with pytest.raises(CheckpointDamaged):
            decode_manifest(changed, step=1, where="m")


def signed(table: dict[str, Any]) -> bytes:
    """A manifest with a digest that fits."""
    table = {key: value for key, value in table.items() if key != "digest"}
    body = json.dumps(table, separators=(",", ":")).encode()
    return json.dumps({**table, "digest": digest(body)}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"digest": 1}'],
    ids=["nothing", "null", "list", "table", "no text", "deep lists", "wrong digest"],
)
def test_a_manifest_that_is_something_else_is_damaged(store: LocalStorage, save: Any, data: bytes) -> None:
    path_of(store, save(store, 1), "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        read_manifest(store, 1)
    assert list_checkpoints(store)[0].state == "damaged"


def test_a_later_format_says_so_and_is_not_passed_over(store: LocalStorage, save: Any) -> None:
    save(store, 1)
    path = path_of(store, save(store, 2), "manifest.json")
    path.write_bytes(signed({**json.loads(path.read_bytes()), "format": 3}))
    with pytest.raises(CheckpointTooNew, match="its format is 3"):
        latest(store, warn=lambda line: None)
    assert [status.state for status in list_checkpoints(store)] == ["committed", "committed"]
    assert len(verify(store, 2)) == 1


def found_sound(store: LocalStorage) -> None:
    with suppress(CheckpointNotFound):
        assert find_problems(store, 2, "digests") == []


def commanded_sound(store: LocalStorage) -> None:
    assert main(["checkpoint", "verify", store.uri, "--deep"]) == 0


def searched_sound(store: LocalStorage) -> None:
    lines: list[str] = []
    assert latest(store, warn=lines.append) is not None
    assert lines == []


@pytest.mark.parametrize("check", [found_sound, commanded_sound, searched_sound])
def test_a_step_that_a_run_deletes_at_any_read_is_not_damaged(
    store: LocalStorage, save: Any, check: Callable[[LocalStorage], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, left = LocalStorage.open_read, 0

    def deleting(storage: LocalStorage, key: str, *place: Any) -> Any:
        nonlocal left
        left -= key.startswith("step-00000002")
        if left == 0:
            delete_step(storage, 2)
        return opened(storage, key, *place)

    monkeypatch.setattr(LocalStorage, "open_read", deleting)
    save(store, 1)
    for reads in range(1, 100):
        save(store, 2)
        left = reads
        check(store)
        if left > 0:
            break
        left = 0
        delete_step(store, 2)
    assert 4 < reads < 100
