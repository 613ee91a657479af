"""Tests that every store of checkpoints must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.store_contract import StoreContract

    class TestMyStorage(StoreContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(f"my://{tmp_path}", MyConfig())

        def reopen(self, storage):
            return MyStorage(storage.uri, MyConfig())
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from nxdt_core.checkpoint import (
    CheckpointFacts,
    latest,
    list_checkpoints,
    load_model,
    load_state,
    plan_save,
    prune,
    save,
    verify,
)
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.protocols.store import CheckpointStore
from nxdt_testing.ranks import RankPool, process_group

__all__ = ["StoreContract"]

Opener = Callable[[], CheckpointStore]
_ROUNDS, _WRITERS = 8, 8
BAD_KEYS = ("", "/", "/absolute", "a//b", "a/", "..", "../a", "a/../b", "a/..", ".", "a/./b")
MISSING_KEYS = 1100
"""More than one request can delete on stores that take 1,000 keys in each."""


def write(storage: CheckpointStore, key: str, data: bytes) -> None:
    """Write an object."""
    with storage.open_write(key) as stream:
        stream.write(data)


def read(storage: CheckpointStore, key: str, start: int = 0, length: int | None = None) -> bytes:
    """Return the bytes of an object, or of a range of it."""
    with storage.open_read(key, start, length) as stream:
        return stream.read()


def pattern(size: int) -> bytes:
    """Return bytes whose every window differs from its neighbours, so that a shifted range shows."""
    return array("I", range(size // 4 + 1)).tobytes()[:size]


def write_on_rank(open_store: Opener) -> tuple[list[bool], dict[str, int], set[str]]:
    """Write, compete and list in one of several processes.

    Returns:
        Whether this rank's ``put_if_absent`` created the object of each round; sizes of what it wrote, by key; and all
        keys, once every process has written.
    """
    storage, sizes, won = open_store(), {}, []
    with process_group():
        rank = dist.get_rank()
        for round_ in range(_ROUNDS):
            key, size = f"shared/{round_}/rank-{rank}", 1000 * rank + round_
            dist.barrier()
            write(storage, key, bytes(size))
            sizes[key] = size
            won.append(storage.put_if_absent(f"shared/{round_}/manifest", bytes([rank]) * 4096))
        dist.barrier()
        return won, sizes, {info.key for info in storage.list()}


class StoreContract:
    """Override the fixture ``storage``, and :meth:`reopen` where ``type(storage)(uri, None)`` will not do."""

    page_size: ClassVar[int | None] = None
    """Objects in one answer of the store to a listing, where it answers in pages; one more than that is then listed."""

    part_bytes: ClassVar[int] = 2**20
    """Size of the parts in which the store writes large objects; the tests write objects around multiples of it."""

    @pytest.fixture
    def storage(self) -> CheckpointStore:
        """Return an empty store; a new one for each test."""
        raise NotImplementedError("override the fixture 'storage'")

    def reopen(self, storage: CheckpointStore) -> CheckpointStore:
        """Another object on the same store, as another process would have it."""
        return type(storage)(storage.uri, None)

    def opener(self, storage: CheckpointStore) -> Opener | None:
        """Return what opens the same store in another process, to be pickled; None for a store that lives in one
        process."""
        return partial(type(storage), storage.uri, None)

    def test_it_has_the_members_of_the_protocol(self, storage: CheckpointStore) -> None:
        """The store has every method of the protocol and ``uri``."""
        assert isinstance(storage, CheckpointStore), "inherit from nxdt_core.protocols.store.CheckpointStore"
        assert isinstance(storage.uri, str)
        assert storage.uri

    @pytest.mark.parametrize("size", [0, 1, 3 * 2**20 + 1])
    def test_bytes_come_back(self, storage: CheckpointStore, size: int) -> None:
        """Streamed in pieces of any size, also none."""
        data = pattern(size)
        with storage.open_write("a/b.bin") as stream:
            for start in range(0, size, 2**20 - 1):
                piece = memoryview(data)[start : start + 2**20 - 1]
                assert stream.write(piece) == len(piece)
        assert read(self.reopen(storage), "a/b.bin") == data

    @pytest.mark.parametrize("parts", [1, 2, 3])
    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_objects_of_several_parts_come_back(self, storage: CheckpointStore, parts: int, more: int) -> None:
        """Whole and by ranges across the borders, also where the last part is full or has a single byte."""
        size = parts * self.part_bytes + more
        data = pattern(size)
        with storage.open_write("a/large") as stream:
            for start in range(0, size, 700_001):
                stream.write(data[start : start + 700_001])
        info = storage.stat("a/large")
        assert info is not None
        assert info.size_bytes == size
        assert read(self.reopen(storage), "a/large") == data
        border = max(0, (parts - 1) * self.part_bytes - 10)
        for start, length in ((border, 20), (border, None), (size - 1, 5), (1, size - 2)):
            expected = data[start : None if length is None else start + length]
            assert read(storage, "a/large", start, length) == expected

    def test_writing_replaces_the_whole_object(self, storage: CheckpointStore) -> None:
        """A shorter object keeps nothing of the longer one."""
        write(storage, "a", b"a longer object")
        write(storage, "a", b"short")
        assert read(storage, "a") == b"short"
        assert [info.size_bytes for info in storage.list()] == [5]

    @pytest.mark.parametrize(
        ("start", "length"),
        [(0, None), (0, 4), (3, 4), (3, None), (9, 1), (9, 100), (10, None), (10, 1), (5, 0), (0, 10)],
    )
    def test_ranges_are_exact(self, storage: CheckpointStore, start: int, length: int | None) -> None:
        """Half-open, cut at the end of the object, possibly empty."""
        data = b"0123456789"
        write(storage, "a", data)
        expected = data[start:] if length is None else data[start : start + length]
        assert read(storage, "a", start, length) == expected

    def test_a_range_can_be_read_in_pieces(self, storage: CheckpointStore) -> None:
        """``read(n)`` never gives more than n bytes nor goes beyond the range, and ends with ``b""``."""
        write(storage, "a", pattern(1000))
        pieces = []
        with storage.open_read("a", 100, 500) as stream:
            while piece := stream.read(64):
                assert len(piece) <= 64
                pieces.append(piece)
        assert b"".join(pieces) == pattern(1000)[100:600]

    @pytest.mark.parametrize("key", ["missing", "folder", "folder/file/below"])
    def test_missing_objects_are_missing(self, storage: CheckpointStore, key: str) -> None:
        """Also where the key is a prefix of others, or continues below an object."""
        write(storage, "folder/file", b"x")
        assert storage.stat(key) is None
        with pytest.raises(FileNotFoundError):
            read(storage, key)

    def test_facts_of_an_object(self, storage: CheckpointStore) -> None:
        """``stat`` and ``list`` return the key, the size, and a time that does not decrease."""
        write(storage, "a/first", b"12345")
        write(storage, "a/second", b"")
        first, second = storage.stat("a/first"), storage.stat("a/second")
        assert first is not None
        assert second is not None
        assert (first.key, first.size_bytes, second.size_bytes) == ("a/first", 5, 0)
        assert 0 < first.modified <= second.modified
        assert list(storage.list("a/")) == [first, second]

    def test_listing_is_sorted_by_key_and_prefixes_are_plain_text(self, storage: CheckpointStore) -> None:
        """``-`` sorts before ``/``, which a walk through directories gets wrong."""
        keys = ["step-1/b", "step-1-x/a", "step-1/a/z", "step-10/a", "other", "step-1/a.b"]
        for key in keys:
            write(storage, key, b"")

        def listed(prefix: str = "") -> list[str]:
            return [info.key for info in storage.list(prefix)]

        assert listed() == sorted(keys)
        assert listed("step-1") == sorted(key for key in keys if key.startswith("step-1"))
        assert listed("step-1/") == ["step-1/a.b", "step-1/a/z", "step-1/b"]
        assert listed("step-1/a") == ["step-1/a.b", "step-1/a/z"]
        assert listed("nothing/here") == []

    def test_long_listings_are_complete(self, storage: CheckpointStore) -> None:
        """And sorted: more objects than one answer of the store holds, of names that directories order otherwise."""
        if self.page_size is None:
            pytest.skip("the store does not list in pages (page_size is None)")
        keys = sorted(f"many{'-/.'[i % 3]}{i:06d}" for i in range(self.page_size + 1))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: write(storage, key, b""), reversed(keys)))
        assert [info.key for info in storage.list("many")] == keys

    @pytest.mark.parametrize(
        "key", ["with space", "a+b%20c", "ü/é.json", "a=b&c#d?e", pytest.param("x" * 200, id="200 letters")]
    )
    def test_unusual_names_are_names(self, storage: CheckpointStore, key: str) -> None:
        """Keys are not decoded, encoded or shortened."""
        write(storage, key, b"1")
        assert read(self.reopen(storage), key) == b"1"
        assert [info.key for info in storage.list()] == [key]
        storage.delete_many([key])
        assert storage.stat(key) is None

    def test_deleting(self, storage: CheckpointStore) -> None:
        """Any iterable of keys, more than one request takes, most of which do not exist."""
        for key in ("a/b", "a/c", "d"):
            write(storage, key, b"x")
        storage.delete_many([])
        storage.delete_many(key for key in [*(f"no/{i}" for i in range(MISSING_KEYS)), "a/b", "d"])
        assert [info.key for info in storage.list()] == ["a/c"]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_leave_the_root_are_refused(self, storage: CheckpointStore, key: str) -> None:
        """Refuse them in every method that takes a key."""
        uses: list[Callable[[], object]] = [
            lambda: write(storage, key, b"x"),
            lambda: read(storage, key),
            lambda: storage.stat(key),
            lambda: storage.delete_many([key]),
            lambda: storage.put_if_absent(key, b"x"),
            lambda: storage.put_if_match(key, b"x", b"y"),
        ]
        for use in uses:
            with pytest.raises(StorageError):
                use()

    def test_checkpoints_live_in_it(self, storage: CheckpointStore) -> None:
        """Saved, found, verified, loaded, replaced and pruned."""
        weight = torch.arange(12.0).reshape(3, 4)
        for step in (1, 2, 2, 3):
            plan = plan_save(
                storage,
                step=step,
                model={"w": weight * step},
                optimizer={"w/exp_avg": weight},
                state={"position": step, "rng": torch.arange(5)},
                facts=CheckpointFacts(consumed_samples=step),
            )
            save(storage, plan)
        other = self.reopen(storage)
        assert [(status.step, status.state) for status in list_checkpoints(other)] == [
            (step, "committed") for step in (1, 2, 3)
        ]
        assert [verify(other, step) for step in (1, 2, 3)] == [[], [], []]
        manifest = latest(other, warn=pytest.fail)
        assert manifest is not None
        assert manifest.step == 3
        assert torch.equal(load_model(other, manifest)["w"], weight * 3)
        assert load_state(other, manifest)["position"] == 3
        assert prune(storage, 1) == [1, 2]
        assert {info.key.split("/")[0] for info in other.list()} == {"step-00000003"}

    # Writers that are interrupted, or compete in threads and processes

    def test_an_object_shows_only_when_its_writing_has_ended(self, storage: CheckpointStore) -> None:
        """An unfinished object is in no listing, and has neither facts nor bytes."""
        other = self.reopen(storage)
        with storage.open_write("a/b") as stream:
            stream.write(b"x" * 2**20)
            assert list(other.list()) == []
            assert other.stat("a/b") is None
            with pytest.raises(FileNotFoundError):
                read(other, "a/b")
        assert [info.key for info in other.list()] == ["a/b"]

    def test_an_exception_while_writing_leaves_nothing(self, storage: CheckpointStore) -> None:
        """The exception itself comes through."""
        with pytest.raises(ZeroDivisionError):
            _interrupt(storage, "a/b", ZeroDivisionError, b"half")
        assert storage.stat("a/b") is None
        assert list(storage.list()) == []

    def test_an_exception_while_replacing_leaves_the_old_object(self, storage: CheckpointStore) -> None:
        """The old object stays complete."""
        write(storage, "a", b"old")
        with pytest.raises(ZeroDivisionError):
            _interrupt(storage, "a", ZeroDivisionError, b"half of something new")
        assert read(storage, "a") == b"old"

    @pytest.mark.parametrize("interruption", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("replacing", [False, True])
    def test_an_interruption_between_any_two_writes_leaves_nothing(
        self, storage: CheckpointStore, interruption: type[BaseException], replacing: bool
    ) -> None:
        """An interrupted writer leaves no part, and keeps an earlier object; the key can be written again."""
        piece = pattern(self.part_bytes // 2 + 1)
        if replacing:
            write(storage, "a/b", b"old")
        before = list(storage.list())
        for writes in range(6):
            with pytest.raises(interruption):
                _interrupt(storage, "a/b", interruption, *[piece] * writes)
            assert list(self.reopen(storage).list()) == before, f"after {writes} writes"
        write(storage, "a/b", piece * 3)
        assert read(storage, "a/b") == piece * 3

    def test_put_if_absent_creates_once(self, storage: CheckpointStore) -> None:
        """And never touches what is there, whichever way it was written."""
        assert storage.put_if_absent("a/m.json", b"first") is True
        assert storage.put_if_absent("a/m.json", b"second") is False
        assert read(self.reopen(storage), "a/m.json") == b"first"
        write(storage, "b", b"streamed")
        assert storage.put_if_absent("b", b"other") is False
        assert read(storage, "b") == b"streamed"
        storage.delete_many(["a/m.json"])
        assert storage.put_if_absent("a/m.json", b"third") is True

    def test_put_if_absent_has_one_winner(self, storage: CheckpointStore) -> None:
        """Let one of several simultaneous writers win; the object has all of its bytes."""
        self._race(storage, lambda store, key, data: store.put_if_absent(key, data))

    def test_put_if_match_replaces_what_is_expected_only(self, storage: CheckpointStore) -> None:
        """It also never creates an object."""
        assert storage.put_if_match("a/m.json", b"new", b"") is False
        assert storage.stat("a/m.json") is None
        write(storage, "a/m.json", b"first")
        for other in (b"", b"firs", b"first!", b"other"):
            assert storage.put_if_match("a/m.json", b"second", other) is False
        assert read(self.reopen(storage), "a/m.json") == b"first"
        assert storage.put_if_match("a/m.json", b"second", b"first") is True
        assert storage.put_if_match("a/m.json", b"third", b"first") is False
        assert read(self.reopen(storage), "a/m.json") == b"second"
        storage.delete_many(["a/m.json"])
        assert storage.put_if_match("a/m.json", b"third", b"second") is False
        assert list(storage.list()) == []

    def test_put_if_match_has_one_winner(self, storage: CheckpointStore) -> None:
        """Let one of several writers that expect the same bytes win; the object has all of its bytes."""
        self._race(storage, lambda store, key, data: store.put_if_match(key, data, b"before"), b"before")

    def test_ranks_write_and_compete_at_once(self, storage: CheckpointStore) -> None:
        """Write from many processes: nothing that one holds in memory or locks decides; each sees what all have
        written."""
        open_store = self.opener(storage)
        if open_store is None:
            pytest.skip("the store lives in one process (opener gives None)")
        environment = dict(os.environ)  # credentials may be in it
        reports = RankPool(3).run(write_on_rank, open_store, timeout_s=120, environment=environment)
        for round_, won in enumerate(zip(*(report[0] for report in reports), strict=True)):
            assert won.count(True) == 1, f"round {round_}: {won}"
            assert read(storage, f"shared/{round_}/manifest") == bytes([won.index(True)]) * 4096
        written = {key: size for _, sizes, _ in reports for key, size in sizes.items()}
        stored = {info.key: info.size_bytes for info in storage.list()}
        assert written.items() <= stored.items()
        assert all(listed == stored.keys() for _, _, listed in reports)

    def test_concurrent_writers_of_one_key_leave_one_whole_object(self, storage: CheckpointStore) -> None:
        """The object is that of the last writer to finish, never a mixture."""
        barrier = threading.Barrier(4)

        def write(number: int) -> None:
            with storage.open_write("a") as stream:
                barrier.wait()
                for _ in range(16):
                    stream.write(bytes([number]) * 4096)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        data = read(storage, "a")
        assert len(data) == 16 * 4096
        assert len(set(data)) == 1

    def test_writers_and_deleters_of_neighbours_do_not_disturb_each_other(self, storage: CheckpointStore) -> None:
        """Also where a directory becomes empty and is needed again at the same moment."""

        def work(number: int) -> None:
            for i in range(10):
                key = f"shared/{number}-{i}"
                write(storage, key, b"x")
                assert read(storage, key) == b"x"
                storage.delete_many([key])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert list(storage.list()) == []

    def _race(
        self, storage: CheckpointStore, put: Callable[[CheckpointStore, str, bytes], bool], old: bytes | None = None
    ) -> None:
        """Let ``put`` of several stores write a key at once, each another object, in some rounds."""
        stores = [self.reopen(storage) for _ in range(_WRITERS)]
        barrier = threading.Barrier(_WRITERS)

        def compete(number: int) -> bool:
            barrier.wait()
            return put(stores[number], key, bytes([number]) * 4096)

        for round_ in range(5):
            key = f"race/{round_}"
            if old is not None:
                write(storage, key, old)
            with ThreadPoolExecutor(_WRITERS) as pool:
                won = list(pool.map(compete, range(_WRITERS)))
            assert won.count(True) == 1
            assert read(storage, key) == bytes([won.index(True)]) * 4096


def _interrupt(storage: CheckpointStore, key: str, interruption: type[BaseException], *pieces: bytes) -> None:
    """Write some of an object, then raise in the middle of it."""
    with storage.open_write(key) as stream:
        for piece in pieces:
            stream.write(piece)
        raise interruption
