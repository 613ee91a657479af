"""Stores on the real server, small parts, and a proxy that spoils requests on their way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage

from tests.http_faults import FaultProxy
from tests.s3_server import S3Server

PART_BYTES = 5 * 2**20
Open = Callable[..., S3Storage]


@pytest.fixture
def config(s3_server: S3Server) -> S3StorageConfig:
    """Of the server, with the smallest parts that S3 takes."""
    return S3StorageConfig(
        endpoint_url=s3_server.url, part_bytes=PART_BYTES, concurrency=3, read_timeout_s=20, deadline_s=30
    )


@pytest.fixture
def storage(s3_uri: str, config: S3StorageConfig) -> S3Storage:
    return S3Storage(s3_uri, config)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.url) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: FaultProxy, s3_uri: str, config: S3StorageConfig) -> Open:
    """``behind(**changes)``: a store on the same place as ``storage``, behind the proxy."""

    def open_it(uri: str = s3_uri, **changes: Any) -> S3Storage:
        return S3Storage(uri, config.changed(endpoint_url=proxy.url, **changes))

    return open_it
