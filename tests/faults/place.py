"""Where the jobs of these tests save: a directory, or a prefix in the bucket of a real S3 server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage

from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.protocols.store import CheckpointStore
from tests.s3_server import BUCKET, ENVIRONMENT

__all__ = ["Place"]

_PART_BYTES = 5 * 2**20
"""The least that S3 takes."""


@dataclass(frozen=True, slots=True)
class Place:
    """One store; it travels to the processes that use it."""

    uri: str
    endpoint_url: str = ""
    """Of the S3 server; empty for a directory."""
    in_parts: bool = False
    """Whether one tensor is so large that S3 takes it in two parts."""

    @property
    def elements(self) -> int:
        """Of the largest tensor."""
        return _PART_BYTES // 4 + 1000 if self.in_parts else 600

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process needs to open it."""
        return dict(ENVIRONMENT) if self.endpoint_url else {}

    def open(self, endpoint_url: str = "") -> CheckpointStore:
        """The store, or the same by way of a proxy at ``endpoint_url``, where silence is short."""
        if not self.endpoint_url:
            return LocalStorage(self.uri)
        config = S3StorageConfig(
            endpoint_url=endpoint_url or self.endpoint_url,
            part_bytes=_PART_BYTES,
            concurrency=2,
            read_timeout_s=2.0 if endpoint_url else 20.0,
            max_attempts=4,
            deadline_s=10.0,
            abandoned_after_s=0.001,
        )
        return S3Storage(self.uri, config)

    def leftovers(self) -> list[str]:
        """What lies there and no listing of objects shows: files of killed writers, parts of their uploads."""
        if not self.endpoint_url:
            names = (str(Path(folder, name)) for folder, _, files in os.walk(self.uri) for name in files)
            return [name for name in names if "/.nxdt-tmp-" in name]
        storage = S3Storage(self.uri, S3StorageConfig(endpoint_url=self.endpoint_url))
        prefix = self.uri.removeprefix(f"s3://{BUCKET}/") + "/"
        found = storage._connection().client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        return [f"upload of {upload['Key']}" for upload in found.get("Uploads", [])]
