"""The local store and the memory store keep the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nxdt_testing.store_contract import StoreContract

from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.config.schema import LocalStorageConfig
from tests.checkpoint.memory import MemoryStorage


class TestLocalStorage(StoreContract):
    page_size = 20

    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(str(tmp_path / "not there yet"), LocalStorageConfig())


class TestLocalStorageWithoutFsync(StoreContract):
    page_size = 20

    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(str(tmp_path), LocalStorageConfig(fsync=False))

    def opener(self, storage: Any) -> None:
        """None: other processes compete for a store with fsync, of which this one differs in its flushing alone."""


class TestLocalStorageWithoutHardLinks(StoreContract):
    """As on file systems that have none."""

    page_size = 20

    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
        def no_link(*_: Any, **__: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("os.link", no_link)
        return LocalStorage(str(tmp_path), LocalStorageConfig(fsync=False))

    def opener(self, storage: Any) -> None:
        """None: other processes would have hard links, since the patch is of this process."""


class TestMemoryStorage(StoreContract):
    page_size = 20

    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()

    def reopen(self, storage: Any) -> MemoryStorage:
        return MemoryStorage(storage.uri, storage.objects)

    def opener(self, storage: Any) -> None:
        return None
