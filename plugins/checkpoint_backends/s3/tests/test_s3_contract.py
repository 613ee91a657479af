"""The store keeps the contract of stores, on a real server."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage

from nxdt_core.testing.storage_contract import CheckpointStorageContract


class TestS3Storage(CheckpointStorageContract):
    page_size = 1000
    part_bytes = 5 * 2**20

    @pytest.fixture
    def storage(self, s3_uri: str, config: S3StorageConfig) -> S3Storage:
        self.config = config
        return S3Storage(s3_uri, config)

    def reopen(self, storage: Any) -> S3Storage:
        return S3Storage(storage.uri, self.config)

    def opener(self, storage: Any) -> Any:
        return partial(S3Storage, storage.uri, self.config)
