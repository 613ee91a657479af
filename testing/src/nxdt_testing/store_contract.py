"""What every store of checkpoints must keep; its author subclasses it once.

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

import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch

from nxdt_core.checkpoint import (
    CheckpointFacts,
    latest,
    list_checkpoints,
    load_model,
    load_state,
    prune,
    verify,
)
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.protocols.store import CheckpointStore
from nxdt_testing.stores.ranks import Opener, work_together
from nxdt_testing.stores.saving import save_checkpoint

__all__ = ["StoreContract"]

BAD_KEYS = ("", "/", "/absolute", "a//b", "a/", "..", "../a", "a/../b", "a/..", ".", "a/./b")
MISSING_KEYS = 1100
"""More than one request can delete on stores that take 1,000 keys in each."""


class StoreContract:
    """Override the fixture ``storage``, and :meth:`reopen` where ``type(storage)(uri, None)`` will not do."""

    page_size: ClassVar[int | None] = None
    """Objects in one answer of the store to a listing, where it answers in pages; one more than that is then listed."""
    part_bytes: ClassVar[int] = 2**20
    """Where the store writes large objects in parts, the size of one; objects around multiples of it are written."""

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
        assert isinstance(storage, CheckpointStore)
        assert isinstance(storage.uri, str)
        assert storage.uri

    @pytest.mark.parametrize("size", [0, 1, 3 * 2**20 + 1])
    def test_bytes_come_back(self, storage: CheckpointStore, size: int) -> None:
        """Streamed in pieces of any size, also none."""
        data = _pattern(size)
        with storage.open_write("a/b.bin") as stream:
            for start in range(0, size, 2**20 - 1):
                piece = memoryview(data)[start : start + 2**20 - 1]
                assert stream.write(piece) == len(piece)
        assert _read(self.reopen(storage), "a/b.bin") == data

    def test_an_object_shows_only_when_its_writing_has_ended(self, storage: CheckpointStore) -> None:
        """Not in a listing, not by its facts, not by its bytes."""
        other = self.reopen(storage)
        with storage.open_write("a/b") as stream:
            stream.write(b"x" * 2**20)
            assert list(other.list()) == []
            assert other.stat("a/b") is None
            with pytest.raises(FileNotFoundError):
                _read(other, "a/b")
        assert [info.key for info in other.list()] == ["a/b"]

    def test_an_exception_while_writing_leaves_nothing(self, storage: CheckpointStore) -> None:
        """The exception itself comes through."""
        with pytest.raises(ZeroDivisionError):
            _interrupt(storage, "a/b", ZeroDivisionError, b"half")
        assert storage.stat("a/b") is None
        assert list(storage.list()) == []

    def test_an_exception_while_replacing_leaves_the_old_object(self, storage: CheckpointStore) -> None:
        """The old object stays complete."""
        _write(storage, "a", b"old")
        with pytest.raises(ZeroDivisionError):
            _interrupt(storage, "a", ZeroDivisionError, b"half of something new")
        assert _read(storage, "a") == b"old"

    @pytest.mark.parametrize("parts", [1, 2, 3])
    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_objects_of_several_parts_come_back(self, storage: CheckpointStore, parts: int, more: int) -> None:
        """Whole and by ranges across the borders, also where the last part is full or has a single byte."""
        size = parts * self.part_bytes + more
        data = _pattern(size)
        with storage.open_write("a/large") as stream:
            for start in range(0, size, 700_001):
                stream.write(data[start : start + 700_001])
        found = storage.stat("a/large")
        assert found is not None
        assert found.size_bytes == size
        assert _read(self.reopen(storage), "a/large") == data
        border = max(0, (parts - 1) * self.part_bytes - 10)
        for start, length in ((border, 20), (border, None), (size - 1, 5), (1, size - 2)):
            expected = data[start : None if length is None else start + length]
            assert _read(storage, "a/large", start, length) == expected

    @pytest.mark.parametrize("interruption", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("replacing", [False, True])
    def test_an_interruption_between_any_two_writes_leaves_nothing(
        self, storage: CheckpointStore, interruption: type[BaseException], replacing: bool
    ) -> None:
        """Not even where whole parts were written before; what was there stays; the key can be written again."""
        piece = _pattern(self.part_bytes // 2 + 1)
        if replacing:
            _write(storage, "a/b", b"old")
        before = list(storage.list())
        for writes in range(6):
            with pytest.raises(interruption):
                _interrupt(storage, "a/b", interruption, *[piece] * writes)
            assert list(self.reopen(storage).list()) == before, f"after {writes} writes"
        _write(storage, "a/b", piece * 3)
        assert _read(storage, "a/b") == piece * 3

    def test_writing_replaces_the_whole_object(self, storage: CheckpointStore) -> None:
        """A shorter object keeps nothing of the longer one."""
        _write(storage, "a", b"a longer object")
        _write(storage, "a", b"short")
        assert _read(storage, "a") == b"short"
        assert [info.size_bytes for info in storage.list()] == [5]

    @pytest.mark.parametrize(
        ("start", "length"),
        [(0, None), (0, 4), (3, 4), (3, None), (9, 1), (9, 100), (10, None), (10, 1), (5, 0), (0, 10)],
    )
    def test_ranges_are_exact(self, storage: CheckpointStore, start: int, length: int | None) -> None:
        """Half-open, cut at the end of the object, possibly empty."""
        data = b"0123456789"
        _write(storage, "a", data)
        expected = data[start:] if length is None else data[start : start + length]
        assert _read(storage, "a", start, length) == expected

    def test_a_range_can_be_read_in_pieces(self, storage: CheckpointStore) -> None:
        """``read(n)`` never gives more than n bytes nor goes beyond the range, and ends with ``b""``."""
        _write(storage, "a", _pattern(1000))
        pieces = []
        with storage.open_read("a", 100, 500) as stream:
            while piece := stream.read(64):
                assert len(piece) <= 64
                pieces.append(piece)
        assert b"".join(pieces) == _pattern(1000)[100:600]

    @pytest.mark.parametrize("key", ["missing", "folder", "folder/file/below"])
    def test_missing_objects_are_missing(self, storage: CheckpointStore, key: str) -> None:
        """Also where the key is a prefix of others, or continues below an object."""
        _write(storage, "folder/file", b"x")
        assert storage.stat(key) is None
        with pytest.raises(FileNotFoundError):
            _read(storage, key)

    def test_facts_of_an_object(self, storage: CheckpointStore) -> None:
        """``stat`` and ``list`` return the key, the size, and a time that does not decrease."""
        _write(storage, "a/first", b"12345")
        _write(storage, "a/second", b"")
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
            _write(storage, key, b"")

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
            list(pool.map(lambda key: _write(storage, key, b""), reversed(keys)))
        assert [info.key for info in storage.list("many")] == keys

    @pytest.mark.parametrize(
        "key", ["with space", "a+b%20c", "ü/é.json", "a=b&c#d?e", pytest.param("x" * 200, id="200 letters")]
    )
    def test_unusual_names_are_names(self, storage: CheckpointStore, key: str) -> None:
        """Keys are not decoded, encoded or shortened."""
        _write(storage, key, b"1")
        assert _read(self.reopen(storage), key) == b"1"
        assert [info.key for info in storage.list()] == [key]
        storage.delete_many([key])
        assert storage.stat(key) is None

    def test_deleting(self, storage: CheckpointStore) -> None:
        """Any iterable of keys, more than one request takes, most of which do not exist."""
        for key in ("a/b", "a/c", "d"):
            _write(storage, key, b"x")
        storage.delete_many([])
        storage.delete_many(key for key in [*(f"no/{i}" for i in range(MISSING_KEYS)), "a/b", "d"])
        assert [info.key for info in storage.list()] == ["a/c"]

    def test_put_if_absent_creates_once(self, storage: CheckpointStore) -> None:
        """And never touches what is there, whichever way it was written."""
        assert storage.put_if_absent("a/m.json", b"first") is True
        assert storage.put_if_absent("a/m.json", b"second") is False
        assert _read(self.reopen(storage), "a/m.json") == b"first"
        _write(storage, "b", b"streamed")
        assert storage.put_if_absent("b", b"other") is False
        assert _read(storage, "b") == b"streamed"
        storage.delete_many(["a/m.json"])
        assert storage.put_if_absent("a/m.json", b"third") is True

    def test_put_if_absent_has_one_winner(self, storage: CheckpointStore) -> None:
        """Let one of several simultaneous writers win; the object has all of its bytes."""
        stores = [self.reopen(storage) for _ in range(8)]
        for round_ in range(5):
            key = f"race/{round_}"
            won = _race(stores, lambda store, data, key=key: store.put_if_absent(key, data))  # type: ignore[misc]
            assert won.count(True) == 1
            assert _read(storage, key) == bytes([won.index(True)]) * 4096

    def test_put_if_match_replaces_what_is_expected_only(self, storage: CheckpointStore) -> None:
        """It also never creates an object."""
        assert storage.put_if_match("a/m.json", b"new", b"") is False
        assert storage.stat("a/m.json") is None
        _write(storage, "a/m.json", b"first")
        for other in (b"", b"firs", b"first!", b"other"):
            assert storage.put_if_match("a/m.json", b"second", other) is False
        assert _read(self.reopen(storage), "a/m.json") == b"first"
        assert storage.put_if_match("a/m.json", b"second", b"first") is True
        assert storage.put_if_match("a/m.json", b"third", b"first") is False
        assert _read(self.reopen(storage), "a/m.json") == b"second"
        storage.delete_many(["a/m.json"])
        assert storage.put_if_match("a/m.json", b"third", b"second") is False
        assert list(storage.list()) == []

    def test_put_if_match_has_one_winner(self, storage: CheckpointStore) -> None:
        """Let one of several writers that expect the same bytes win; the object has all of its bytes."""
        stores = [self.reopen(storage) for _ in range(8)]
        for round_ in range(5):
            key = f"race/{round_}"
            _write(storage, key, b"before")
            won = _race(stores, lambda store, data, key=key: store.put_if_match(key, data, b"before"))  # type: ignore[misc]
            assert won.count(True) == 1
            assert _read(storage, key) == bytes([won.index(True)]) * 4096

    def test_ranks_write_and_compete_at_once(self, storage: CheckpointStore) -> None:
        """Write from many processes: nothing that one holds in memory or locks decides; each sees what all have
        written."""
        open_store = self.opener(storage)
        if open_store is None:
            pytest.skip("the store lives in one process (opener gives None)")
        reports = work_together(open_store, 3)
        for round_, won in enumerate(zip(*(report.won for report in reports), strict=True)):
            assert won.count(True) == 1, f"round {round_}: {won}"
            assert _read(storage, f"shared/{round_}/manifest") == bytes([won.index(True)]) * 4096
        written = {key: size for report in reports for key, size in report.own.items()}
        found = {info.key: info.size_bytes for info in storage.list()}
        assert written.items() <= found.items()
        assert all(report.listed == found.keys() for report in reports)

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
        data = _read(storage, "a")
        assert len(data) == 16 * 4096
        assert len(set(data)) == 1

    def test_writers_and_deleters_of_neighbours_do_not_disturb_each_other(self, storage: CheckpointStore) -> None:
        """Also where a directory becomes empty and is needed again at the same moment."""

        def work(number: int) -> None:
            for i in range(10):
                key = f"shared/{number}-{i}"
                _write(storage, key, b"x")
                assert _read(storage, key) == b"x"
                storage.delete_many([key])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert list(storage.list()) == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_leave_the_root_are_refused(self, storage: CheckpointStore, key: str) -> None:
        """Refuse them in every method that takes a key."""
        uses: list[Callable[[], object]] = [
            lambda: _write(storage, key, b"x"),
            lambda: _read(storage, key),
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
            save_checkpoint(
                storage,
                step=step,
                model={"w": weight * step},
                optimizer={"w/exp_avg": weight},
                state={"position": step, "rng": torch.arange(5)},
                facts=CheckpointFacts(consumed_samples=step),
            )
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


def _pattern(size: int) -> bytes:
    """Bytes whose every window differs from its neighbours, so that a shifted range shows."""
    return array("I", range(size // 4 + 1)).tobytes()[:size]


def _write(storage: CheckpointStore, key: str, data: bytes) -> None:
    with storage.open_write(key) as stream:
        stream.write(data)


def _race(stores: list[CheckpointStore], put_object: Callable[[CheckpointStore, bytes], bool]) -> list[bool]:
    """Return what ``put_object`` returned for each of ``stores``, all called at once, each with a different object."""
    barrier = threading.Barrier(len(stores))

    def put(number: int) -> bool:
        barrier.wait()
        return put_object(stores[number], bytes([number]) * 4096)

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(put, range(len(stores))))


def _interrupt(storage: CheckpointStore, key: str, interruption: type[BaseException], *pieces: bytes) -> None:
    """Write some of an object, then raise in the middle of it."""
    with storage.open_write(key) as stream:
        for piece in pieces:
            stream.write(piece)
        raise interruption


def _read(storage: CheckpointStore, key: str, start: int = 0, length: int | None = None) -> bytes:
    with storage.open_read(key, start, length) as stream:
        return stream.read()
