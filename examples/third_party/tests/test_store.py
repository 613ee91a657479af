"""The store keeps what nxdt asks of every store."""

from pathlib import Path

import pytest
from acme_nxdt.store import SQLiteStore
from nxdt_testing.store_contract import StoreContract


class TestSQLiteStore(StoreContract):
    """All tests are inherited."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> SQLiteStore:
        """An empty store."""
        return SQLiteStore(f"sqlite://{tmp_path}/checkpoints.db")
