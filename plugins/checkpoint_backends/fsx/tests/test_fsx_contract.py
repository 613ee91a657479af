"""The store keeps the contract: as a plain directory, and on Lustre."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nxdt_plugin_fsx.storage import FsxStorage
from nxdt_testing.store_contract import StoreContract


class TestOnAnyFileSystem(StoreContract):
    page_size = 20

    @pytest.fixture
    def storage(self, tmp_path: Path) -> FsxStorage:
        return FsxStorage(f"fsx://{tmp_path}/not there yet")

    @pytest.mark.slow
    def test_ranks_write_and_compete_at_once(self, storage: FsxStorage) -> None:
        """By default the contract of ``LocalStorage`` shows it, from which the method is inherited."""
        super().test_ranks_write_and_compete_at_once(storage)


class TestOnLustre(StoreContract):
    page_size = 20

    @pytest.fixture
    def storage(self, lustre: Path, lfs: Any) -> FsxStorage:
        return FsxStorage(f"fsx://{lustre}/not there yet")

    def opener(self, storage: Any) -> None:
        """None: other processes would not see Lustre, since the table of mounts is patched in this one."""
