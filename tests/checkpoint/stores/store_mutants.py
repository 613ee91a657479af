"""Wrong stores, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_store_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import io
import time
from contextlib import contextmanager
from typing import Any

import pytest
from nxdt_testing.store_contract import StoreContract

from nxdt_core.protocols.store import ObjectInfo
from tests.checkpoint.memory import MemoryStorage
from tests.checkpoint.stores.store_of_one_process import LocksInOneProcess

PART_BYTES = 4096


class _Contract(StoreContract):
    store: type[MemoryStorage]

    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return self.store()

    def reopen(self, storage: Any) -> MemoryStorage:
        return self.store(storage.uri, storage.objects)

    def opener(self, storage: Any) -> None:
        return None


class ShowsUnfinished(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        self.put_if_absent(key, b"")
        with super().open_write(key) as stream:
            yield stream


class CommitsAfterAnException(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        self.check_key(key)
        stream = io.BytesIO()
        try:
            yield stream
        finally:
            self.objects[key] = (stream.getvalue(), time.time())


class SwallowsTheException(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        try:
            with super().open_write(key) as stream:
                yield stream
        except ZeroDivisionError:
            pass


class LosesAFullLastPart(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        with super().open_write(key) as stream:
            yield stream
            if stream.tell() % PART_BYTES == 0 and stream.tell() > PART_BYTES:
                stream.truncate(stream.tell() - PART_BYTES)


class ReadsToTheEndOfAPart(MemoryStorage):
    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None):
        border = PART_BYTES - start % PART_BYTES
        with super().open_read(key, start, border if length is None else min(length, border)) as stream:
            yield stream


class KeepsWholePartsAfterAnException(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        self.check_key(key)
        stream, parts = io.BytesIO(), 0
        try:
            yield stream
            parts = stream.tell()
        finally:
            parts = parts or stream.tell() // PART_BYTES * PART_BYTES
            if parts or not stream.tell():
                self.objects[key] = (stream.getvalue()[:parts], time.time())


class CommitsWhenInterrupted(MemoryStorage):
    """It cleans up after ``Exception`` and forgets that Ctrl-C is none."""

    @contextmanager
    def open_write(self, key: str):
        self.check_key(key)
        stream, failed = io.BytesIO(), False
        try:
            yield stream
        except Exception:
            failed = True
            raise
        finally:
            if not failed:
                self.objects[key] = (stream.getvalue(), time.time())


class Appends(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        with super().open_write(key) as stream:
            stream.write(self.objects.get(key, (b"", 0))[0])
            yield stream


class IgnoresLength(MemoryStorage):
    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None):
        with super().open_read(key, start) as stream:
            yield stream


class InclusiveRange(MemoryStorage):
    """As HTTP's ``Range: bytes=a-b`` is."""

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None):
        with super().open_read(key, start, None if length is None else length + 1) as stream:
            yield stream


class EmptyLengthIsAll(MemoryStorage):
    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None):
        with super().open_read(key, start, length or None) as stream:
            yield stream


class RaisesKeyErrorWhereMissing(MemoryStorage):
    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None):
        self.check_key(key)
        yield io.BytesIO(self.objects[key][0][start : None if length is None else start + length])


class StatRaisesWhereMissing(MemoryStorage):
    def stat(self, key: str):
        found = super().stat(key)
        if found is None:
            raise FileNotFoundError(key)
        return found


class ListsInOrderOfWriting(MemoryStorage):
    def list(self, prefix: str = ""):
        for key, (data, modified) in self.objects.items():
            if key.startswith(prefix):
                yield ObjectInfo(key=key, size_bytes=len(data), modified=modified)


class ListsAsAWalkWould(MemoryStorage):
    def list(self, prefix: str = ""):
        yield from sorted(super().list(prefix), key=lambda info: info.key.split("/"))


class PrefixIsADirectory(MemoryStorage):
    def list(self, prefix: str = ""):
        folder = prefix.rstrip("/") + "/" if prefix else ""
        yield from super().list(folder)


class ListsOnePage(MemoryStorage):
    def list(self, prefix: str = ""):
        yield from list(super().list(prefix))[:10]


class SortsEachPage(MemoryStorage):
    def list(self, prefix: str = ""):
        found = sorted(super().list(prefix), key=lambda info: info.key.split("/"))
        for start in range(0, len(found), 10):
            yield from sorted(found[start : start + 10], key=lambda info: info.key)


class DecodesKeys(MemoryStorage):
    def list(self, prefix: str = ""):
        for info in super().list(prefix):
            yield ObjectInfo(key=info.key.replace("+", " "), size_bytes=info.size_bytes, modified=info.modified)


class DeletesOneRequest(MemoryStorage):
    def delete_many(self, keys: Any) -> None:
        super().delete_many(list(keys)[:1000])


class DeletingTheMissingFails(MemoryStorage):
    def delete_many(self, keys: Any) -> None:
        for key in keys:
            self.check_key(key)
            del self.objects[key]


class PutOverwrites(MemoryStorage):
    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.check_key(key)
        absent = key not in self.objects
        self.objects[key] = (data, time.time())
        return absent


class PutChecksThenActs(MemoryStorage):
    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.check_key(key)
        if key in self.objects:
            return False
        time.sleep(0.01)
        self.objects[key] = (data, time.time())
        return True


class MatchOverwrites(MemoryStorage):
    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        self.check_key(key)
        matches = self.objects.get(key, (None,))[0] == expected
        if key in self.objects:
            self.objects[key] = (data, time.time())
        return matches


class MatchCreates(MemoryStorage):
    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        return super().put_if_match(key, data, expected) or self.put_if_absent(key, data)


class MatchComparesLengths(MemoryStorage):
    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        found = self.objects.get(key, (b"",))[0]
        return super().put_if_match(key, data, found if len(found) == len(expected) else expected)


class MatchChecksThenActs(MemoryStorage):
    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        self.check_key(key)
        if key not in self.objects or self.objects[key][0] != expected:
            return False
        time.sleep(0.01)
        self.objects[key] = (data, time.time())
        return True


class TakesAnyKey(MemoryStorage):
    def check_key(self, key: str) -> None:
        pass


class ForgetsOnReopening(MemoryStorage):
    def __init__(self, uri: str = "memory://", config: Any = None) -> None:
        super().__init__(uri, None)


class MixesConcurrentWriters(MemoryStorage):
    @contextmanager
    def open_write(self, key: str):
        shared = self.objects.setdefault(f"{key}.part", (io.BytesIO(), 0))[0]
        with super().open_write(key) as stream:
            yield shared
            stream.write(shared.getvalue())
        self.objects.pop(f"{key}.part", None)


class RemembersItsListing(MemoryStorage):
    listed: Any = None

    def list(self, prefix: str = ""):
        if self.listed is None:
            self.listed = [*super().list()]
        return iter([info for info in self.listed if info.key.startswith(prefix)])


class TestLocksInOneProcess(StoreContract):
    @pytest.fixture
    def storage(self, tmp_path: Any) -> LocksInOneProcess:
        return LocksInOneProcess(str(tmp_path))


MUTANTS = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, MemoryStorage)
}


def _contract_of(store: type[MemoryStorage]) -> type[_Contract]:
    return type(
        f"Test{store.__name__}",
        (_Contract,),
        {"store": store, "page_size": 10, "part_bytes": PART_BYTES, "__module__": __name__},
    )


for _store in MUTANTS.values():
    globals()[f"Test{_store.__name__}"] = _contract_of(_store)
