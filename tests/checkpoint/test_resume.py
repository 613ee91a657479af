"""Which checkpoint a run goes on from, and which ones are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nxdt_core.checkpoint import find_checkpoint, latest, list_checkpoints, load_model, prune, read_manifest, verify
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.checkpoints import CheckpointNotFound


def steps(store: LocalStorage) -> list[int]:
    return [status.step for status in list_checkpoints(store)]


def damage(store: LocalStorage, step: int) -> Path:
    """Change a byte in the middle of the model, which names and sizes do not show."""
    path = Path(store.uri) / read_manifest(store, step).prefix / "model" / "shard-00000-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_a_place_without_checkpoints_has_none(store: LocalStorage) -> None:
    assert list_checkpoints(store) == []
    assert latest(store, warn=pytest.fail) is None
    assert prune(store, 1) == []
    with pytest.raises(CheckpointNotFound, match="it does not exist"):
        find_checkpoint(store, None, warn=pytest.fail)
    with pytest.raises(CheckpointNotFound, match="step-00000003"):
        find_checkpoint(store, 3, warn=pytest.fail)
    assert verify(store, 3) == [f"{store.uri}/step-00000003: it does not exist, or its save was not finished"]


def test_the_newest_counts_by_number_not_by_text(store: LocalStorage, save: Any) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(store, step)
    found = latest(store, warn=pytest.fail)
    assert found is not None
    assert found.step == 100_000_000
    assert steps(store) == [5, 99_999_999, 100_000_000]


def test_damaged_ones_are_skipped_with_a_line_and_unfinished_ones_in_silence(store: LocalStorage, save: Any) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    path = damage(store, 3)
    (Path(store.uri) / manifest_key(4)).unlink()
    lines: list[str] = []
    assert find_checkpoint(store, None, warn=lines.append).step == 2
    assert len(lines) == 1
    assert "step-00000003" in lines[0]
    assert str(path) in lines[0]


def test_other_files_in_the_directory_do_not_disturb(store: LocalStorage, save: Any) -> None:
    save(store, 1)
    for name in ("step-9", "step-00000009.bak/manifest.json", "notes.txt", "step-00000008"):
        path = Path(store.uri) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert steps(store) == [1, 8]
    found = latest(store, warn=pytest.fail)
    assert found is not None
    assert found.step == 1


def test_saving_a_step_again_replaces_it(store: LocalStorage, save: Any) -> None:
    first = save(store, 1)
    second = save(store, 1, model={"w": torch.ones(2)})
    assert first.attempt != second.attempt
    assert load_model(store, read_manifest(store, 1)).keys() == {"w"}
    assert {path.name for path in (Path(store.uri) / "step-00000001").iterdir()} == {"manifest.json", second.attempt}


def test_a_damaged_step_can_be_saved_again(store: LocalStorage, save: Any) -> None:
    save(store, 1)
    damage(store, 1)
    save(store, 1)
    assert verify(store, 1) == []
    (Path(store.uri) / manifest_key(1)).write_text("garbage")
    save(store, 1)
    assert verify(store, 1) == []


def test_pruning_keeps_the_newest_and_removes_directories(store: LocalStorage, save: Any) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    assert prune(store, 3) == [1]
    assert prune(store, 3) == []
    assert prune(store, 1) == [2, 3]
    assert [path.name for path in Path(store.uri).iterdir()] == ["step-00000004"]


def test_unfinished_and_damaged_steps_do_not_count_as_kept(store: LocalStorage, save: Any) -> None:
    for step in range(1, 7):
        save(store, step)
    for step in (5, 6):
        (Path(store.uri) / manifest_key(step)).unlink()
    (Path(store.uri) / manifest_key(2)).write_text("garbage")
    assert prune(store, 2) == [1, 2]
    assert steps(store) == [3, 4, 5, 6]


def test_the_last_good_one_is_never_deleted(store: LocalStorage, save: Any) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    damage(store, 3)
    damage(store, 4)
    assert prune(store, 1) == [1]
    found = latest(store, warn=lambda line: None)
    assert found is not None
    assert found.step == 2
    damage(store, 2)
    assert prune(store, 1) == []
    assert steps(store) == [2, 3, 4]


def test_nothing_goes_where_nothing_is_sound(store: LocalStorage, save: Any) -> None:
    for step in (1, 2):
        save(store, step)
    (Path(store.uri) / manifest_key(1)).unlink()
    damage(store, 2)
    assert prune(store, 1) == []
    (Path(store.uri) / manifest_key(2)).unlink()
    assert prune(store, 1) == []
    assert steps(store) == [1, 2]


def test_keeping_none_is_refused(store: LocalStorage) -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        prune(store, 0)
