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

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

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
from nxdt_testing.store_writers import StoreWriters, pattern, read, write

__all__ = ["StoreContract"]

BAD_KEYS = ("", "/", "/absolute", "a//b", "a/", "..", "../a", "a/../b", "a/..", ".", "a/./b")
MISSING_KEYS = 1100
"""More than one request can delete on stores that take 1,000 keys in each."""


class StoreContract(StoreWriters):
    """Override the fixture ``storage``, and :meth:`reopen` where ``type(storage)(uri, None)`` will not do."""

    page_size: ClassVar[int | None] = None
    """Objects in one answer of the store to a listing, where it answers in pages; one more than that is then listed."""

    @pytest.fixture
    def storage(self) -> CheckpointStore:
        """Return an empty store; a new one for each test."""
        raise NotImplementedError("override the fixture 'storage'")

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
        found = storage.stat("a/large")
        assert found is not None
        assert found.size_bytes == size
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
