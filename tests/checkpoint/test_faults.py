"""A store that fails at any call: what was committed stays, what was half done goes, the error says what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import latest, list_checkpoints, prune, read_manifest, verify
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.errors.checkpoints import CheckpointConflict, StorageDenied, StorageError, StorageFull
from tests.checkpoint.faults import FaultyStorage, When
from tests.checkpoint.memory import MemoryStorage

Prepare = Callable[[MemoryStorage, Any], None]


def copy_of(storage: MemoryStorage) -> MemoryStorage:
    """Another store with the same objects, in place of saving them once more for each fault."""
    return MemoryStorage(storage.uri, dict(storage.objects))


def nothing_there(storage: MemoryStorage, save: Any) -> None:
    """Step 2 is new."""


def committed_before(storage: MemoryStorage, save: Any) -> None:
    save(storage, 2)


def damaged_before(storage: MemoryStorage, save: Any) -> None:
    save(storage, 2)
    storage.objects[manifest_key(2)] = (b"{", 0.0)


def unfinished_before(storage: MemoryStorage, save: Any) -> None:
    save(storage, 2)
    storage.delete_many([manifest_key(2)])


SITUATIONS = [nothing_there, committed_before, damaged_before, unfinished_before]


def faults(prepared: MemoryStorage, act: Callable[[FaultyStorage], None]) -> Iterator[dict[str, Any]]:
    """Every call of ``act`` × before or after it × once or from then on."""
    counting = FaultyStorage(copy_of(prepared))
    act(counting)
    for call in range(counting.calls):
        for when in ("before", "after"):
            for forever in (False, True):
                yield {"fail_at": call, "when": when, "forever": forever}


@pytest.mark.parametrize("prepare", SITUATIONS)
def test_a_save_that_fails_at_any_call_leaves_good_checkpoints(save: Any, prepare: Prepare) -> None:
    prepared = MemoryStorage()
    save(prepared, 1)
    prepare(prepared, save)
    before = {status.step for status in list_checkpoints(prepared) if status.state == "committed"}
    for fault in faults(prepared, lambda storage: save(storage, 2)):
        storage = copy_of(prepared)
        failure: StorageError | None = None
        try:
            save(FaultyStorage(storage, **fault), 2)
        except StorageError as error:
            failure = error
        good = {status.step for status in list_checkpoints(storage) if verify(storage, status.step) == []}
        assert good >= before, f"{fault} cost a good checkpoint"
        if failure is None:
            assert 2 in good, f"{fault} gave success without a checkpoint"
        else:
            assert isinstance(failure, StorageFull), fault
        save(storage, 2)
        assert verify(storage, 2) == []
        attempts = {info.key.split("/")[1] for info in storage.list("step-00000002/")}
        assert attempts == {"manifest.json", read_manifest(storage, 2).attempt}, f"{fault} left files for ever"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_leaves_no_partial_attempt(save: Any, when: When) -> None:
    """Deleting works on a full disk, so what the failed save wrote must be gone."""
    counting = FaultyStorage(MemoryStorage())
    save(counting, 1)
    for call in range(counting.calls):
        storage = MemoryStorage()
        with suppress(StorageFull):
            save(FaultyStorage(storage, call, when=when), 1)
        committed = manifest_key(1) in storage.objects
        assert committed or not storage.objects, f"failing {when} call {call} leaves {sorted(storage.objects)}"


def test_the_error_of_the_system_decides_the_code(save: Any) -> None:
    def error(number: int) -> Callable[[], OSError]:
        return lambda: OSError(number, "reason of the system")

    expected = {errno.ENOSPC: "NXDT-S001", errno.EDQUOT: "NXDT-S001", errno.EROFS: "NXDT-S002", errno.EIO: "NXDT-S000"}
    for number, code in expected.items():
        with pytest.raises(StorageError, match="reason of the system") as caught:
            save(FaultyStorage(MemoryStorage("mem://a"), 3, error=error(number)), 1)
        assert caught.value.code == code
        assert "mem://a/step-00000001" in str(caught.value)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_other_exceptions_pass_and_clean_up_too(save: Any, error: type[BaseException], when: When) -> None:
    counting = FaultyStorage(MemoryStorage())
    save(counting, 1)
    for call in range(counting.calls):
        storage = MemoryStorage()
        with pytest.raises(error):
            save(FaultyStorage(storage, call, when=when, error=error), 1)
        assert not storage.objects or verify(storage, 1) == [], f"failing {when} call {call}"


def test_an_answer_exists_to_our_own_manifest_is_success(save: Any) -> None:
    """A store that repeats a request on its own finds what its first one did."""

    class Repeating(MemoryStorage):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            super().put_if_absent(key, data)
            return super().put_if_absent(key, data)

    storage = Repeating()
    manifest = save(storage, 1)
    assert read_manifest(storage, 1).attempt == manifest.attempt
    assert verify(storage, 1) == []


@pytest.mark.parametrize(
    ("existed", "moment"),
    [(False, "open_write"), (True, "open_write"), (False, "put_if_absent"), (True, "put_if_match")],
)
def test_a_late_writer_cannot_touch_what_another_committed(
    save: Any, monkeypatch: pytest.MonkeyPatch, existed: bool, moment: str
) -> None:
    """Two jobs save one step; the one that commits last is refused and takes its own files away.

    The other saves all of it just before the late one writes its first file, or its manifest.
    """
    other = MemoryStorage()
    if existed:
        save(other, 1)
    late = MemoryStorage("memory://", other.objects)
    winners: list[str] = []

    def call(*arguments: Any) -> Any:
        if not winners:
            winners.append(save(other, 1).attempt)
        return getattr(MemoryStorage, moment)(late, *arguments)

    monkeypatch.setattr(late, moment, call)
    with raises(CheckpointConflict, match="NXDT-S014"):
        save(late, 1)
    assert read_manifest(other, 1).attempt == winners[0]
    assert verify(other, 1) == []
    assert {info.key.split("/")[1] for info in other.list()} == {"manifest.json", winners[0]}


def test_pruning_that_fails_at_any_call_damages_nothing(save: Any) -> None:
    prepared = MemoryStorage()
    for step in range(1, 5):
        save(prepared, step)
    for fault in faults(prepared, lambda storage: prune(storage, 2) and None):
        storage = copy_of(prepared)
        with pytest.raises(StorageFull):
            prune(FaultyStorage(storage, **fault), 2)
        states = {status.step: status.state for status in list_checkpoints(storage)}
        assert "damaged" not in states.values(), fault
        assert [verify(storage, step) for step in (3, 4)] == [[], []]
        assert prune(storage, 2) == [step for step in (1, 2) if step in states]
        assert {info.key.split("/")[0] for info in storage.list()} == {"step-00000003", "step-00000004"}


def test_pruning_that_stops_between_two_files_leaves_an_unfinished_step(save: Any) -> None:
    class Stopping(MemoryStorage):
        def delete_many(self, keys: Any) -> None:
            for key in list(keys)[:1]:
                super().delete_many([key])
                raise OSError(errno.EIO, "the connection is gone")

    storage = Stopping()
    for step in (1, 2):
        save(storage, step)
    with pytest.raises(StorageError, match="connection"):
        prune(storage, 1)
    assert [status.state for status in list_checkpoints(storage)] == ["unfinished", "committed"]


def test_denied_reading_is_an_error_and_not_an_empty_store(save: Any) -> None:
    storage = MemoryStorage()
    save(storage, 1)
    denied = FaultyStorage(storage, 0, forever=True, error=lambda: PermissionError(errno.EACCES, "no"))
    with pytest.raises(StorageDenied):
        latest(denied, warn=lambda line: None)


def test_what_is_asked_before_the_commit_prevents_it(save: Any) -> None:
    storage = MemoryStorage()
    save(storage, 1)
    seen: list[set[str]] = []

    def refuse() -> None:
        seen.append({info.key.rpartition("/")[2] for info in storage.list("step-00000002/")})
        raise StorageDenied(where="memory", reason="it belongs to another run")

    with pytest.raises(StorageDenied, match="another run"):
        save(storage, 2, before_commit=refuse)
    assert "rank-00000.json.digests" in seen[0], "all files are there when it is asked"
    assert [status.step for status in list_checkpoints(storage)] == [1]
