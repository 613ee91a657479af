"""One run at a time saves to a store: by a lock, by a lease; what a death, a pause and a copy leave behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import CheckpointFacts, list_checkpoints, read_manifest
from nxdt_core.checkpoint.ownership import Owner, Ownership, decode_owner, is_owned, own, take_lease, this_process
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.checkpoints import CheckpointConflict, OwnershipLost, StorageFull, StoreInUse
from nxdt_core.protocols.store import CheckpointStore, LocksUnsupported
from tests import processes
from tests.checkpoint.faults import FaultyStorage, When
from tests.checkpoint.memory import MemoryStorage

EXPIRY_S = 1.0
"""Of leases in these tests; long enough for a loaded machine to beat six times, short enough to wait for."""


class Unlockable(LocalStorage):
    """A directory of a file system without locks, shared by processes."""

    def try_lock(self, key: str, note: bytes) -> None:
        raise LocksUnsupported(38, "Function not implemented")


STORES = {"lock": LocalStorage, "lease": Unlockable}


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def take() -> Iterator[Callable[..., Ownership]]:
    """Own a store for the time of the test; unexpected lines fail."""
    with ExitStack() as stack:

        def take_it(storage: CheckpointStore, **more: Any) -> Ownership:
            more = {"say": said_nothing, "expiry_s": EXPIRY_S, "run": "second", **more}
            ownership = own(storage, **more)
            stack.callback(ownership.release)
            return ownership

        yield take_it


def said_nothing(line: str) -> None:
    if "lease instead of a lock" not in line:
        pytest.fail(line)


CHILD = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    import nxdt_core.checkpoint.ownership as ownership
    from {module} import EXPIRY_S, STORES
    storage = STORES[sys.argv[1]](sys.argv[2])
    own = ownership.own(storage, run="first", say=lambda line: None, expiry_s=EXPIRY_S)
    print(own.fencing, flush=True)
    {then}
"""


class Child:
    """Another process that owns a store."""

    def __init__(self, kind: str, uri: str, then: str = "time.sleep(600)", **options: Any) -> None:
        here = Path(__file__)
        script = textwrap.dedent(CHILD).format(tests=str(here.parent), module=here.stem, then=then)
        command = [sys.executable, "-c", script, kind, uri]
        self.process = processes.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options)
        assert self.process.stdout is not None
        self.fencing = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*args: Any, **options: Any) -> Child:
        children.append(Child(*args, **options))
        return children[-1]

    yield start
    for each in children:
        each.process.kill()
        each.process.communicate()


def elsewhere(run: str = "elsewhere", **changed: Any) -> Owner:
    """This process, as if it were one of another machine."""
    return replace(this_process(run, {}), **{"machine": "another boot/pid:[1]", "host": "node7", **changed})


def silent(storage: CheckpointStore, owner: Owner) -> int:
    """An owner that took the store, and of which nothing is heard any more."""
    lease = take_lease(storage, owner, say=said_nothing, expiry_s=EXPIRY_S)
    lease._stopped.set()
    return lease.fencing


def test_a_second_run_is_refused_at_once_and_told_who_has_the_place(
    tmp_path: Path, kind: str, child: Callable[..., Child], take: Callable[..., Ownership]
) -> None:
    first = child(kind, str(tmp_path / "c"))
    with pytest.raises(StoreInUse, match=f"NXDT-S040.*{tmp_path}/c belongs to 'first'.*{first.process.pid}") as caught:
        take(STORES[kind](str(tmp_path / "c")), expiry_s=600)
    assert "running on this machine" in caught.value.reason
    assert "checkpoint.uri" in str(caught.value)


def test_a_store_is_owned_while_its_owner_lives_and_to_ask_changes_nothing(
    tmp_path: Path, kind: str, child: Callable[..., Child]
) -> None:
    storage = STORES[kind](str(tmp_path / "c"))
    assert not is_owned(storage)
    assert not (tmp_path / "c").exists()
    first = child(kind, str(tmp_path / "c"))
    processes.pause(first.process)
    before = {path: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert is_owned(storage)
    first.kill()
    assert not is_owned(storage)
    assert {path: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before


def test_after_sigkill_the_next_run_has_it_at_once(
    tmp_path: Path, kind: str, child: Callable[..., Child], take: Callable[..., Ownership]
) -> None:
    first = child(kind, str(tmp_path / "c"))
    first.kill()
    second = take(STORES[kind](str(tmp_path / "c")), expiry_s=600)
    second.check()


def test_workers_that_outlive_a_killed_run_do_not_keep_its_lock(
    tmp_path: Path, child: Callable[..., Child], take: Callable[..., Ownership]
) -> None:
    """A data loader's workers are forked, and notice seconds later that they are orphans."""
    fork = "print(os.fork() or '', flush=True); time.sleep(600)"
    first = child("lock", str(tmp_path / "c"), fork)
    assert first.process.stdout is not None
    worker = int("".join(first.process.stdout.readline().strip() for _ in range(2)))
    first.kill()
    try:
        os.kill(worker, 0)
        take(LocalStorage(str(tmp_path / "c")), expiry_s=600)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_two_runs_in_one_process_are_two_runs(tmp_path: Path, kind: str, take: Callable[..., Ownership]) -> None:
    storage = STORES[kind](str(tmp_path / "c"))
    first = take(storage)
    with pytest.raises(StoreInUse):
        take(STORES[kind](str(tmp_path / "c")))
    first.release()
    first.release()
    take(storage).check()


def test_a_copied_directory_is_nobodys(
    tmp_path: Path, kind: str, child: Callable[..., Child], take: Callable[..., Ownership], save: Any
) -> None:
    storage = STORES[kind](str(tmp_path / "original"))
    first = child(kind, storage.uri)
    save(storage, 1)
    shutil.copytree(storage.uri, tmp_path / "copy")
    first.kill()
    original = take(storage)
    copy = take(STORES[kind](str(tmp_path / "copy")))
    assert len(list_checkpoints(STORES[kind](copy_uri := str(tmp_path / "copy")))) == 1, copy_uri
    original.check()
    copy.check()


def test_the_copy_of_a_directory_that_is_owned_elsewhere_is_free_after_the_expiry(
    take: Callable[..., Ownership],
) -> None:
    """Its owner gives signs of life, but not in the copy."""
    storage, lines = MemoryStorage(), list[str]()
    lease = take_lease(storage, elsewhere(), say=said_nothing, expiry_s=EXPIRY_S)
    copied = MemoryStorage("memory://copy", dict(storage.objects))
    try:
        take(copied, say=lines.append).check()
        lease.check()
    finally:
        lease.release()
    assert len(lines) == 1
    assert "waiting for up to 1 s for a sign of life of 'elsewhere'" in lines[0]


def test_numbers_grow_from_owner_to_owner_and_lie_above_those_of_checkpoints(
    tmp_path: Path, kind: str, take: Callable[..., Ownership], save: Any
) -> None:
    storage = STORES[kind](str(tmp_path / "c"))
    first = take(storage)
    save(storage, 1, facts=CheckpointFacts(fencing=first.fencing))
    first.release()
    second = take(storage)
    assert second.fencing > first.fencing > 0
    save(storage, 2, facts=CheckpointFacts(fencing=40))
    second.release()
    assert take(storage).fencing == 41
    assert read_manifest(storage, 1).facts.fencing == first.fencing


def test_a_lock_and_a_lease_show_in_no_listing_of_steps(tmp_path: Path, take: Callable[..., Ownership]) -> None:
    storage = LocalStorage(str(tmp_path / "c"))
    take(storage)
    assert list(storage.list()) == []
    assert list_checkpoints(storage) == []
    unlockable = Unlockable(str(tmp_path / "d"))
    take(unlockable)
    assert {info.key.partition("-")[0] for info in unlockable.list()} == {"owner"}
    assert list_checkpoints(unlockable) == []


def test_a_lease_names_its_owner_and_is_renewed_every_ten_seconds() -> None:
    """A process that waits for a sign of life gives up after six of these."""
    storage = MemoryStorage()
    lease: Any = own(storage, run="first", say=said_nothing)
    note, beat = f"owner-{lease.fencing:08d}.json", f"owner-{lease.fencing:08d}.beat"
    assert storage.objects.keys() == {note, beat}
    owner = decode_owner(storage.objects[note][0])
    assert owner is not None
    assert owner.run == "first"
    assert lease._every_s == 10
    assert (own.__kwdefaults__ or {})["expiry_s"] == 60
    lease.release()


def test_an_owner_elsewhere_that_gives_signs_of_life_is_not_disturbed(take: Callable[..., Ownership]) -> None:
    storage, lines = MemoryStorage(), list[str]()
    lease = take_lease(storage, elsewhere(), say=said_nothing, expiry_s=EXPIRY_S)
    try:
        with pytest.raises(StoreInUse, match=r"elsewhere.*node7.*sign of life"):
            take(storage, say=lines.append)
        lease.check()
    finally:
        lease.release()
    assert len(lines) == 1


def test_an_owner_elsewhere_that_is_silent_is_followed(take: Callable[..., Ownership]) -> None:
    storage, lines = MemoryStorage(), list[str]()
    number = silent(storage, elsewhere())
    assert take(storage, say=lines.append).fencing > number
    assert "waiting for up to" in lines[0]
    assert [key for key in sorted(storage.objects) if f"{number:08d}" in key] == [], "what it left is cleaned up"


def test_an_owner_that_ended_in_good_order_is_followed_at_once(take: Callable[..., Ownership]) -> None:
    storage = MemoryStorage()
    take_lease(storage, elsewhere(), say=said_nothing, expiry_s=600).release()
    take(storage, expiry_s=600).check()


SLURM = {"SLURM_JOB_ID": "77"}
BATCH = {"AWS_BATCH_JOB_ID": "5b6c", "AWS_BATCH_JOB_ATTEMPT": "1"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("before", "after", "at_once"),
    [
        (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"}, True),
        (BATCH, {**BATCH, "AWS_BATCH_JOB_ATTEMPT": "2"}, True),
        (BATCH, BATCH, False),
        (ELASTIC, {**ELASTIC, "TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({**SLURM, **ELASTIC}, {**SLURM, **ELASTIC, "SLURM_RESTART_COUNT": "1"}, True),
        (SLURM, SLURM, False),
        (SLURM, {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}, False),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, {**SLURM, "SLURM_RESTART_COUNT": "1"}, False),
        ({**ELASTIC, "TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
        ({"TORCHELASTIC_RUN_ID": "nxdt"}, {"TORCHELASTIC_RUN_ID": "nxdt", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({}, {}, False),
    ],
)
def test_a_job_that_its_scheduler_started_again_follows_itself_at_once(
    take: Callable[..., Ownership], before: dict[str, str], after: dict[str, str], at_once: bool
) -> None:
    """On any machine. The job's number alone is not enough: two steps of one job may run at once."""
    storage, lines = MemoryStorage(), list[str]()
    silent(storage, replace(this_process("first", before), machine="another boot/pid:[1]"))
    take(storage, say=lines.append, me=this_process("second", after), expiry_s=0.3)
    assert (not lines) is at_once


def test_a_paused_owner_that_was_followed_commits_nothing(
    tmp_path: Path, child: Callable[..., Child], take: Callable[..., Ownership]
) -> None:
    """A real process, stopped and continued."""
    uri, then = str(tmp_path / "c"), "sys.stdin.readline(); own.check()"
    first = child("lease", uri, then, stderr=subprocess.PIPE)
    processes.pause(first.process)
    second = take(Unlockable(uri), me=elsewhere("second"), say=lambda line: None)
    first.process.send_signal(signal.SIGCONT)
    _, said = first.process.communicate("go on\n")
    assert "OwnershipLost" in said
    assert "NXDT-S041" in said
    assert "'second'" in said
    second.check()


def test_a_save_of_an_owner_that_was_followed_is_refused(take: Callable[..., Ownership], save: Any) -> None:
    storage = MemoryStorage()
    zombie = take_lease(storage, elsewhere(), say=said_nothing, expiry_s=EXPIRY_S)
    zombie._stopped.set()
    save(storage, 1, before_commit=zombie.check)
    take(storage, say=lambda line: None)
    with raises(OwnershipLost, match=r"memory:// no longer belongs to this run.*'second'.* has taken it over"):
        save(storage, 2, before_commit=zombie.check)
    assert [status.step for status in list_checkpoints(storage)] == [1]
    zombie.release()
    with pytest.raises(StoreInUse):
        take(storage)


def test_a_step_of_a_later_owner_is_not_replaced_by_an_earlier_one(save: Any) -> None:
    storage = MemoryStorage()
    save(storage, 1, facts=CheckpointFacts(fencing=8))
    with raises(CheckpointConflict, match="owner number 8 did, and this is number 7"):
        save(storage, 1, facts=CheckpointFacts(fencing=7))
    for fencing in (0, 8, 9):
        save(storage, 1, facts=CheckpointFacts(fencing=fencing))


def test_a_lock_whose_directory_was_replaced_no_longer_counts(tmp_path: Path, take: Callable[..., Ownership]) -> None:
    """Moved away, and another run began in its place: what this one saves would land there."""
    uri = tmp_path / "c"
    first = take(LocalStorage(str(uri)))
    uri.rename(tmp_path / "moved")
    second = take(LocalStorage(str(uri)))
    with raises(OwnershipLost, match="moved or deleted, and another run began to save there, 'second'"):
        first.check()
    second.check()


def test_a_lock_whose_file_was_deleted_is_taken_again(tmp_path: Path, take: Callable[..., Ownership]) -> None:
    """As a purge of old files on a scratch file system does."""
    uri = tmp_path / "c"
    first = take(LocalStorage(str(uri)))
    shutil.rmtree(uri)
    first.check()
    with pytest.raises(StoreInUse):
        take(LocalStorage(str(uri)))


def test_a_lease_whose_object_was_deleted_no_longer_counts(take: Callable[..., Ownership]) -> None:
    storage = MemoryStorage()
    first = take(storage)
    storage.delete_many(list(storage.objects))
    with raises(OwnershipLost, match="deleted"):
        first.check()


def test_a_lock_that_something_else_keeps_is_told_after_the_expiry(
    tmp_path: Path, child: Callable[..., Child], take: Callable[..., Ownership]
) -> None:
    """A network file system that has not noticed the death of a machine, say."""
    first = child("lock", str(tmp_path / "c"))
    note = next((tmp_path / "c").glob(".nxdt-lock-*"))
    note.write_bytes(elsewhere("first").encode())
    lines: list[str] = []
    with pytest.raises(StoreInUse, match=r"'first'.*another 1 s"):
        take(LocalStorage(str(tmp_path / "c")), say=lines.append)
    assert len(lines) == 1
    assert "is locked by 'first'" in lines[0]
    release = threading.Timer(0.2, first.kill)
    release.start()
    take(LocalStorage(str(tmp_path / "c")), say=lines.append, expiry_s=600).check()


def test_a_file_system_without_locks_is_said_and_leased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    lines: list[str] = []
    ownership = own(LocalStorage(str(tmp_path)), run="a", say=lines.append, expiry_s=EXPIRY_S)
    ownership.release()
    assert lines == [f"{tmp_path} is owned by a lease instead of a lock: Function not implemented"]


@pytest.mark.parametrize(
    ("line", "shared"),
    [
        ("lustre 10.0.0.1@tcp:/fsx rw,flock,lazystatfs", True),
        ("lustre 10.0.0.1@tcp:/fsx rw,lazystatfs", False),
        ("lustre 10.0.0.1@tcp:/fsx rw,localflock", False),
        ("nfs4 fs-1:/ rw,vers=4.1,local_lock=none", True),
        ("nfs fs-1:/ rw,vers=3,nolock,local_lock=all", False),
        ("fuse.mount-s3 mountpoint-s3 rw", False),
        ("ext4 /dev/vda rw", True),
    ],
)
def test_locks_that_other_machines_do_not_see_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, shared: bool
) -> None:
    mounts, data = tmp_path / "mountinfo", tmp_path / "a place\x0c\r\u2028"
    point = str(data).replace(" ", r"\040")
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:40 / {point} rw,noatime shared:7 - {line}\n")
    monkeypatch.setattr("nxdt_core.system.file_lock.MOUNTS", mounts)
    storage = LocalStorage(str(data / "not there yet"))
    if not shared:
        with pytest.raises(LocksUnsupported, match="other machines"):
            storage.try_lock("owner", b"")
    else:
        lock = storage.try_lock("owner", b"me")
        assert lock is not None
        assert storage.lock_note("owner") == b"me"
        lock.release()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_store_that_fails_while_it_is_taken_leaves_it_free(take: Callable[..., Ownership], when: When) -> None:
    """At any call, and also where the call did its work and only the answer was lost."""
    counting = FaultyStorage(MemoryStorage())
    ownership = own(counting, run="counting", say=said_nothing, expiry_s=600)
    calls = counting.calls
    ownership.release()
    assert calls > 5
    for call in range(calls):
        storage = MemoryStorage()
        with suppress(StorageFull):
            faulty = FaultyStorage(storage, call, when=when)
            own(faulty, run="first", say=said_nothing, expiry_s=600, me=elsewhere("first")).release()
        take(storage, expiry_s=600).release()


def test_a_store_that_repeats_a_request_on_its_own_knows_its_first_one(take: Callable[..., Ownership]) -> None:
    class Repeating(MemoryStorage):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            super().put_if_absent(key, data)
            return super().put_if_absent(key, data)

    take(Repeating(), expiry_s=600).check()


def test_whoever_comes_late_with_a_number_that_is_free_again_does_not_own(take: Callable[..., Ownership]) -> None:
    """Two others have had the store between its look and its claim; the second has it still."""
    objects: dict[str, Any] = {}

    class Late(MemoryStorage):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            if not objects:
                take(MemoryStorage("memory://", objects), me=elsewhere("a")).release()
                take(MemoryStorage("memory://", objects), me=elsewhere("b"))
            return super().put_if_absent(key, data)

    with pytest.raises(StoreInUse, match="'b'"):
        take(Late("memory://", objects), say=lambda line: None)


def test_notes_that_are_none_are_told_as_such() -> None:
    mine = this_process("a")
    assert decode_owner(mine.encode()) == mine
    for data in (b"", b"{", b"[]", b"{}", b"null", mine.encode()[:-5], b'{"job": 1, "restarts": []}'):
        assert decode_owner(data) is None


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    mine = this_process("a")
    assert mine.liveness_of(mine) == "running"
    assert mine.liveness_of(replace(mine, started="1")) == "gone"
    assert mine.liveness_of(elsewhere()) == "unknown"
    with subprocess.Popen(["sleep", "600"]) as other:
        found = replace(mine, pid=other.pid)
        stat = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
        assert mine.liveness_of(replace(found, started=stat[19])) == "running"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert mine.liveness_of(replace(found, started=stat[19])) == "gone", "what is left of it is nobody"


@settings(max_examples=12, deadline=None)
@given(
    state=st.sampled_from(["empty", "released", "silent", "copied"]),
    delays=st.lists(st.lists(st.sampled_from([0.0, 0.0005, 0.002]), min_size=1, max_size=5), min_size=2, max_size=5),
)
def test_of_several_takers_one_owns(state: str, delays: list[list[float]]) -> None:
    """Calls of the store interleave as the delays have it; whoever owned and was followed knows it."""
    expiry_s = 0.05
    objects: dict[str, Any] = {}
    storage = MemoryStorage("memory://", objects)
    if state != "empty":
        before = take_lease(storage, elsewhere(), say=said_nothing, expiry_s=expiry_s)
        if state == "released":
            before.release()
        else:
            before._stopped.set()
    if state == "copied":
        storage.objects = objects = dict(objects)
    start = threading.Barrier(len(delays))

    def taker(number: int) -> Any:
        waits = delays[number]

        class Slow(MemoryStorage):
            calls = 0

            def _wait(self) -> None:
                self.calls += 1
                time.sleep(waits[self.calls % len(waits)])

            def list(self, prefix: str = "") -> Any:
                self._wait()
                return iter([*super().list(prefix)])

            def put_if_absent(self, key: str, data: bytes) -> bool:
                self._wait()
                with LOCK:
                    return super().put_if_absent(key, data)

            def delete_many(self, keys: Any) -> None:
                self._wait()
                super().delete_many(keys)

        me = elsewhere(f"taker {number}", machine=f"machine {number}")
        start.wait()
        try:
            return take_lease(Slow("memory://", objects), me, say=lambda line: None, expiry_s=expiry_s * 20)
        except StoreInUse:
            return None

    with ThreadPoolExecutor(len(delays)) as pool:
        leases = [lease for lease in pool.map(taker, range(len(delays))) if lease is not None]
    sound = []
    for lease in leases:
        try:
            lease.check()
            sound.append(lease)
        except NxdtError:
            pass
    for lease in leases:
        lease.release()
    assert len(leases) == len(sound) == 1


LOCK = threading.Lock()
