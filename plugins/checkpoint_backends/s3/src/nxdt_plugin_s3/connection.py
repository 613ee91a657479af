"""What one process needs to talk to its bucket: a client, threads, buffers. Never shared across a fork."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import botocore.session
from botocore.config import Config
from botocore.loaders import Loader, create_loader

from nxdt_plugin_s3.address import Address
from nxdt_plugin_s3.checksums import Checksum, choose
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.errors import S3ChecksumUnavailable
from nxdt_plugin_s3.faults import FAILURES, Place
from nxdt_plugin_s3.retry import Retrier

__all__ = ["Connection", "sdk_session"]

_CALLERS = 32
"""Connections beyond those of parts and ranges, for threads that call the store at once."""


@final
class Connection:
    """Opened at the first use of a store in a process; may be used by all its threads.

    Raises:
        S3CredentialsMissing: the profile does not exist.
        S3ChecksumUnavailable: the checksum needs a library that is missing.
    """

    def __init__(self, address: Address, config: S3StorageConfig) -> None:
        self.config = config
        self.bucket = address.bucket
        self.place = Place(address, config.endpoint_url or "AWS", config.region or "the SDK's default")
        with self.explained(address.uri, "Connecting"):
            self.client = _client(config)
        self.place = Place(address, self.client.meta.endpoint_url, self.client.meta.region_name)
        self.checksum = _checksum(address, config)
        self.retrier = Retrier(config.max_attempts, config.deadline_s)
        self.threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="nxdt-s3")
        self.slots = threading.BoundedSemaphore(config.concurrency)
        """One for each part in transfer: what bounds the memory of writing."""
        self._spare: deque[bytearray] = deque(maxlen=config.concurrency)

    @contextmanager
    def explained(self, where: str, action: str) -> Iterator[None]:
        """Turn what the SDK raises into errors for a user."""
        try:
            yield
        except FAILURES as error:
            raise self.place.explain(error, where, action) from error

    def object_arguments(self) -> dict[str, str]:
        """Return what each new object is given: encryption and storage class."""
        given = {
            "ServerSideEncryption": self.config.server_side_encryption,
            "SSEKMSKeyId": self.config.kms_key_id,
            "StorageClass": self.config.storage_class,
        }
        return {name: value for name, value in given.items() if value is not None}

    def take_buffer(self) -> bytearray:
        """Return one of ``part_bytes``, with anything in it."""
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(self.config.part_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Keep a buffer for the next part."""
        if len(buffer) == self.config.part_bytes:
            self._spare.append(buffer)


@cache
def _descriptions(paths: str | None) -> Loader:
    """Return the SDK's descriptions of its services below ``paths``, which all clients of a process share.

    Reading them takes 0.08 CPU-seconds, six times as long as the rest of a client.
    """
    return create_loader(paths)


def sdk_session(profile: str | None = None) -> Any:
    """Return a new session of the SDK with its own credentials and settings."""
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


def _client(config: S3StorageConfig) -> Any:
    settings = Config(
        connect_timeout=config.connect_timeout_s,
        read_timeout=config.read_timeout_s,
        max_pool_connections=config.concurrency + _CALLERS,
        tcp_keepalive=True,
        retries={"mode": "standard", "total_max_attempts": 1},  # Retrier tries again
        request_checksum_calculation="when_required",  # Checksum gives them
        response_checksum_validation="when_required",  # digests of blocks are verified above the store
        s3={"addressing_style": config.addressing_style},
    )
    session = sdk_session(config.profile)
    return session.create_client("s3", region_name=config.region, endpoint_url=config.endpoint_url, config=settings)


def _checksum(address: Address, config: S3StorageConfig) -> Checksum:
    try:
        return choose(config.checksum)
    except ModuleNotFoundError as error:
        reason = f"the checksum {config.checksum} needs awscrt, which is not installed"
        raise S3ChecksumUnavailable(where=address.uri, reason=reason) from error
