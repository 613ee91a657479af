"""Copies between stores: byte for byte, verified on the way, committed last, taken up again after any interruption."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import list_checkpoints, load_model, read_manifest, verify
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.format.manifest import digest
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint.copy import copy_checkpoint
from nxdt_core.errors.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointTooNew,
    CopyHasOtherCheckpoint,
    StorageError,
    StorageFull,
)
from nxdt_core.protocols.store import CheckpointStore
from tests import processes
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.memory import MemoryStorage
from tests.sampling import slow

STEP = 4
SEVERAL_BLOCKS = 3 * 2**20
"""Elements of float32: one block of digests and a half."""


class Written(MemoryStorage):
    """Remembers the keys that were written, in order."""

    def __init__(self, uri: str = "memory://", config: Any = None) -> None:
        super().__init__(uri, config)
        self.keys: list[str] = []

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        with super().open_write(key) as stream:
            yield stream
        self.keys.append(key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.keys.append(key)
        return super().put_if_absent(key, data)


@pytest.fixture
def source(save: Any) -> MemoryStorage:
    storage = MemoryStorage("memory://source")
    save(storage, STEP)
    return storage


def content(storage: CheckpointStore) -> dict[str, bytes]:
    """All objects of a store."""
    found = {}
    for info in storage.list():
        with storage.open_read(info.key) as stream:
            found[info.key] = stream.read()
    return found


def flip(storage: MemoryStorage, key: str) -> None:
    """Flip one bit in the middle of an object."""
    data = bytearray(storage.objects[key][0])
    data[len(data) // 2] ^= 4
    storage.objects[key] = (bytes(data), 0.0)


def manifest_with(storage: MemoryStorage, **changed: Any) -> bytes:
    """The manifest of the step with other values, and a digest that fits them."""
    table = {**json.loads(storage.objects[manifest_key(STEP)][0]), **changed}
    table.pop("digest")
    return _dump({**table, "digest": digest(_dump(table))})


def _dump(table: dict[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":")).encode()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_copy_equals_its_source_byte_for_byte(store: LocalStorage, save: Any, tmp_path: Path, threads: int) -> None:
    save(store, STEP, model={"w": torch.arange(SEVERAL_BLOCKS, dtype=torch.float32)})
    destination = LocalStorage(str(tmp_path / "copy"))
    seen: list[int] = []
    report = copy_checkpoint(store, destination, STEP, threads=threads, progress=seen.append)
    assert content(destination) == content(store)
    assert verify(destination, STEP) == []
    files = read_manifest(store, STEP).files
    assert (report.files, report.files_copied, report.was_committed) == (len(files), len(files), False)
    assert sum(seen) == report.bytes_copied == sum(entry.size_bytes for entry in files.values())


def test_from_a_directory_to_another_kind_of_store_and_back(store: LocalStorage, save: Any, tmp_path: Path) -> None:
    save(store, STEP)
    memory, back = MemoryStorage(), LocalStorage(str(tmp_path / "back"))
    copy_checkpoint(store, memory, STEP, threads=4)
    copy_checkpoint(memory, back, STEP, threads=4)
    assert content(back) == content(memory) == content(store)
    assert torch.equal(load_model(back, read_manifest(back, STEP))["w"], torch.full((4, 3), float(STEP)))


def test_the_manifest_comes_last_and_digests_after_their_file(source: MemoryStorage) -> None:
    destination = Written()
    copy_checkpoint(source, destination, STEP, threads=4)
    assert destination.keys[-1] == manifest_key(STEP)
    for key in destination.keys[:-1]:
        if not key.endswith(".digests"):
            assert destination.keys.index(key) < destination.keys.index(f"{key}.digests")


def test_what_is_there_is_not_copied_again(source: MemoryStorage) -> None:
    destination = Written()
    copy_checkpoint(source, destination, STEP)
    destination.keys.clear()
    report = copy_checkpoint(source, destination, STEP)
    assert destination.keys == []
    assert report.was_committed
    assert (report.files_copied, report.bytes_copied) == (0, 0)
    assert report.bytes_kept == sum(entry.size_bytes for entry in read_manifest(source, STEP).files.values())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("forever", [False, True])
def test_a_copy_that_fails_at_any_call_is_finished_by_the_next(source: MemoryStorage, when: Any, forever: bool) -> None:
    counting = FaultyStorage(MemoryStorage())
    copy_checkpoint(source, counting, STEP)
    for call in range(counting.calls):
        inner = Written()
        failed = False
        try:
            copy_checkpoint(source, FaultyStorage(inner, call, when=when, forever=forever), STEP)
        except StorageFull:
            failed = True
        committed = manifest_key(STEP) in inner.objects
        assert committed or failed, f"failing {when} call {call} gave success without a checkpoint"
        assert not committed or verify(inner, STEP) == [], f"failing {when} call {call} committed a broken one"
        finished = {key.removesuffix(".digests") for key in inner.objects if key.endswith(".digests")}
        inner.keys.clear()
        copy_checkpoint(source, inner, STEP)
        assert content(inner) == content(source)
        assert not finished & set(inner.keys), f"after failing {when} call {call} whole files were copied again"


def test_a_source_that_fails_at_any_call_commits_nothing(source: MemoryStorage) -> None:
    counting = FaultyStorage(source)
    copy_checkpoint(counting, MemoryStorage(), STEP)
    for call in range(counting.calls):
        destination = MemoryStorage()
        broken = FaultyStorage(source, call, error=lambda: OSError(errno.EIO, "the disk is broken"))
        with pytest.raises(StorageError, match=r"memory://source.*the disk is broken"):
            copy_checkpoint(broken, destination, STEP)
        assert manifest_key(STEP) not in destination.objects


@pytest.mark.parametrize("threads", [1, 4])
def test_a_flipped_bit_in_any_file_of_the_source_is_refused_and_named(source: MemoryStorage, threads: int) -> None:
    sound = dict(source.objects)
    for key in sound:
        source.objects.update(sound)
        flip(source, key)
        destination = MemoryStorage()
        with pytest.raises(CheckpointDamaged) as caught:
            copy_checkpoint(source, destination, STEP, threads=threads)
        assert caught.value.where == f"memory://source/{key}"
        assert manifest_key(STEP) not in destination.objects
        assert key not in destination.objects


def test_a_damaged_copy_is_mended(source: MemoryStorage) -> None:
    """A file that was lost, one that was cut, a digests file that changed; a changed byte where it is asked for."""
    destination = Written()
    copy_checkpoint(source, destination, STEP)
    lost, cut, changed = sorted(key for key in destination.objects if key.endswith((".safetensors", ".json")))[:3]
    del destination.objects[lost]
    destination.objects[cut] = (destination.objects[cut][0][:-1], 0.0)
    flip(destination, f"{changed}.digests")
    report = copy_checkpoint(source, destination, STEP)
    assert (report.was_committed, report.files_copied) == (True, 3)
    assert content(destination) == content(source)
    flip(destination, changed)
    assert copy_checkpoint(source, destination, STEP).files_copied == 0
    assert copy_checkpoint(source, destination, STEP, deep=True).files_copied == 1
    assert content(destination) == content(source)


def test_another_checkpoint_of_the_step_is_refused_and_left_alone(source: MemoryStorage, save: Any) -> None:
    destination = MemoryStorage("memory://other")
    save(destination, STEP)
    before = content(destination)
    with raises(CopyHasOtherCheckpoint, match="memory://other/step-00000004 holds another checkpoint"):
        copy_checkpoint(source, destination, STEP)
    assert content(destination) == before


def test_leftovers_and_a_damaged_manifest_at_the_destination_give_way(source: MemoryStorage, save: Any) -> None:
    destination = MemoryStorage()
    save(destination, STEP)
    flip(destination, manifest_key(STEP))
    copy_checkpoint(source, destination, STEP)
    assert content(destination) == content(source)


def test_other_steps_at_the_destination_stay(source: MemoryStorage, save: Any) -> None:
    destination = MemoryStorage()
    save(destination, STEP + 1)
    copy_checkpoint(source, destination, STEP)
    assert [status.state for status in list_checkpoints(destination)] == ["committed", "committed"]
    assert verify(destination, STEP + 1) == []


def test_a_writer_that_was_faster_wins(source: MemoryStorage, save: Any) -> None:
    class Raced(MemoryStorage):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key not in self.objects:
                save(MemoryStorage("memory://", self.objects), STEP)
            return super().put_if_absent(key, data)

    destination = Raced()
    with pytest.raises(StorageError, match="NXDT-S014"):
        copy_checkpoint(source, destination, STEP)
    assert verify(destination, STEP) == []
    assert read_manifest(destination, STEP).attempt != read_manifest(source, STEP).attempt


def test_a_source_that_is_pruned_meanwhile_is_not_called_damaged(source: MemoryStorage) -> None:
    class Pruned(MemoryStorage):
        def open_read(self, key: str, start: int = 0, length: int | None = None) -> Any:
            if "shard" in key:
                self.objects.clear()
            return super().open_read(key, start, length)

    with pytest.raises(CheckpointNotFound):
        copy_checkpoint(Pruned("memory://", source.objects), MemoryStorage(), STEP)


def test_what_is_not_committed_or_too_new_is_refused(source: MemoryStorage) -> None:
    with pytest.raises(CheckpointNotFound, match="step-00000005"):
        copy_checkpoint(source, MemoryStorage(), STEP + 1)
    newer = MemoryStorage("memory://newer")
    newer.objects[manifest_key(STEP)] = (manifest_with(source, format=3), 0.0)
    with pytest.raises(CheckpointTooNew, match="memory://newer"):
        copy_checkpoint(newer, MemoryStorage(), STEP)
    with pytest.raises(CheckpointTooNew, match="memory://newer"):
        copy_checkpoint(source, newer, STEP)


def test_facts_that_a_later_version_added_are_kept(source: MemoryStorage) -> None:
    """A copy writes the bytes of the manifest, not what this version understood of them."""
    data = manifest_with(source, colour="blue")
    source.objects[manifest_key(STEP)] = (data, 0.0)
    destination = MemoryStorage()
    copy_checkpoint(source, destination, STEP)
    assert destination.objects[manifest_key(STEP)][0] == data


def test_memory_does_not_grow_with_the_size_of_a_file(save: Any) -> None:
    """No write and no read is larger than a block of digests, whatever the file."""
    source, sizes = MemoryStorage(), []

    class Watched(MemoryStorage):
        @contextmanager
        def open_write(self, key: str) -> Iterator[Any]:
            with super().open_write(key) as stream:
                yield _Tapped(stream, lambda data: sizes.append(len(data)))

    save(source, STEP, model={"w": torch.zeros(2 * SEVERAL_BLOCKS)})
    copy_checkpoint(source, Watched(), STEP)
    assert max(sizes) == 8 * 2**20


_COPY = """
import sys, time
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint.copy import copy_checkpoint

def slowly(size_bytes):
    print(size_bytes, flush=True)
    time.sleep(0.2)

copy_checkpoint(LocalStorage(sys.argv[1]), LocalStorage(sys.argv[2]), 4, threads=2, progress=slowly)
"""


@pytest.mark.parametrize("blocks", [slow(1), 4, slow(7)])
def test_a_killed_copy_is_finished_by_the_next(store: LocalStorage, save: Any, tmp_path: Path, blocks: int) -> None:
    """``test_a_copy_that_fails_at_any_call_is_finished_by_the_next`` stops it at each moment, within one process."""
    model = {name: torch.full((SEVERAL_BLOCKS,), float(number)) for number, name in enumerate("abc")}
    save(store, STEP, model=model)
    place = str(tmp_path / "copy")
    child = processes.Popen([sys.executable, "-c", _COPY, store.uri, place], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(blocks):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    destination = LocalStorage(place)
    assert [status.state for status in list_checkpoints(destination)] in ([], ["unfinished"])
    copy_checkpoint(store, destination, STEP, threads=2)
    assert content(destination) == content(store)
    assert verify(destination, STEP) == []


def test_one_failure_ends_the_copies_of_other_files(save: Any) -> None:
    source = MemoryStorage()
    model = {name: torch.zeros(SEVERAL_BLOCKS) for name in "ab"}
    save(source, STEP, model=model)
    destination = _Endless()
    with pytest.raises(StorageFull):
        copy_checkpoint(source, destination, STEP, threads=2)
    assert not any("model/shard" in key for key in destination.objects)


class _Tapped:
    """A stream that calls ``tap`` before each write."""

    def __init__(self, stream: BinaryIO, tap: Callable[[Any], None]) -> None:
        self._stream = stream
        self._tap = tap

    def write(self, data: bytes) -> int:
        self._tap(data)
        return self._stream.write(data)


class _Endless(MemoryStorage):
    """Takes shards of the model as slowly as it can, until something else failed; has no room for anything else."""

    @contextmanager
    def open_write(self, key: str) -> Iterator[Any]:
        if "model/shard" not in key:
            raise OSError(errno.ENOSPC, "full")
        with super().open_write(key) as stream:
            yield _Tapped(stream, lambda data: time.sleep(0.5))
