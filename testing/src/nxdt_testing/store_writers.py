"""Writers that are interrupted, or compete in threads and processes: tests of the contract of stores."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch.distributed as dist

from nxdt_core.protocols.store import CheckpointStore
from nxdt_testing.ranks import RankPool, process_group

__all__ = ["StoreWriters", "pattern", "read", "write"]

Opener = Callable[[], CheckpointStore]
_ROUNDS, _WRITERS = 8, 8


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
    storage, own, won = open_store(), {}, []
    with process_group():
        rank = dist.get_rank()
        for round_ in range(_ROUNDS):
            key, size = f"shared/{round_}/rank-{rank}", 1000 * rank + round_
            dist.barrier()
            write(storage, key, bytes(size))
            own[key] = size
            won.append(storage.put_if_absent(f"shared/{round_}/manifest", bytes([rank]) * 4096))
        dist.barrier()
        return won, own, {info.key for info in storage.list()}


class StoreWriters:
    """The tests of interrupted writers, and of several at once."""

    part_bytes: ClassVar[int] = 2**20
    """Size of the parts in which the store writes large objects; the tests write objects around multiples of it."""

    def reopen(self, storage: CheckpointStore) -> CheckpointStore:
        """Another object on the same store, as another process would have it."""
        return type(storage)(storage.uri, None)

    def opener(self, storage: CheckpointStore) -> Opener | None:
        """Return what opens the same store in another process, to be pickled; None for a store that lives in one
        process."""
        return partial(type(storage), storage.uri, None)

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
        written = {key: size for _, own, _ in reports for key, size in own.items()}
        found = {info.key: info.size_bytes for info in storage.list()}
        assert written.items() <= found.items()
        assert all(listed == found.keys() for _, _, listed in reports)

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
