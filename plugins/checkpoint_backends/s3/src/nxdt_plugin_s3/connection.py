"""The client of S3: its checksums, and retries with jitter and with one deadline for all requests of a save.

Why not the SDK's own retries: they know neither a deadline nor each other, so that a store that fails for every object
delays a save by (objects × attempts); and they draw from Python's global random generator, whose state a training run
saves and restores.
"""

from __future__ import annotations

import base64
import logging
import random
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, TypeVar, final

import botocore.session
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from botocore.loaders import Loader, create_loader

from nxdt_plugin_s3.address import Address
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.errors import S3ChecksumUnavailable
from nxdt_plugin_s3.faults import FAILURES, Place, is_transient, redacted

_BYTES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}


@dataclass(frozen=True, slots=True)
class Checksum:
    """One algorithm; all of them give the GIL up, or take half a millisecond for 16 MiB."""

    algorithm: str
    """Name of the algorithm in S3, such as ``CRC32C``."""
    compute: Callable[[bytes | memoryview], int]
    size_bytes: int

    def arguments(self, data: bytes | memoryview) -> dict[str, str]:
        """Return what a request that carries ``data`` says of it."""
        digest = self.compute(data).to_bytes(self.size_bytes, "big")
        return {f"Checksum{self.algorithm}": base64.b64encode(digest).decode()}


def choose(name: str) -> Checksum:
    """Return the algorithm of ``checkpoint.storage.checksum``.

    Raises:
        ModuleNotFoundError: it needs awscrt, which is not installed.
    """
    if name == "crc32":
        return Checksum("CRC32", zlib.crc32, _BYTES[name])
    try:
        crt = import_module("awscrt.checksums")
    except ModuleNotFoundError:
        if name == "auto":
            return choose("crc32")
        raise
    known = "crc32c" if name == "auto" else name
    return Checksum(known.upper(), getattr(crt, known), _BYTES[known])


T = TypeVar("T")

_log = logging.getLogger(__name__)

_BASE_S, _LONGEST_S = 0.1, 10.0
_FIRST_CONTACT_S = 15.0
"""A host that never answered is more likely misspelt than down; a person waits for that message."""


@dataclass(slots=True)
class _Failures:
    """Time that failures have cost one save."""

    lost_s: float = 0.0
    failing: int = 0
    """Requests that are being tried again at the moment."""
    since: float = 0.0
    """Time at which the first of these began to fail; where none is failing, at which the last one ended."""


@final
class RetryBudget:
    """Time that each group of requests has spent on failures, counted once where several fail together.

    A group whose requests have all succeeded for as long as the deadline gets its whole budget back.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._failures: defaultdict[str, _Failures] = defaultdict(_Failures)
        self._lock = threading.Lock()

    def begin(self, group: str, since: float) -> bool:
        """Record that a request of ``group``, sent at ``since``, has failed for the first time; True where it is the
        only one."""
        with self._lock:
            failures = self._failures[group]
            if not failures.failing:
                if since - failures.since > self._deadline_s:
                    failures.lost_s = 0.0
                failures.since = since
            failures.failing += 1
            return failures.failing == 1

    def end(self, group: str) -> None:
        """Record that a request has succeeded, or was given up."""
        with self._lock:
            failures = self._failures[group]
            failures.failing -= 1
            if not failures.failing:
                now = time.monotonic()
                failures.lost_s += now - failures.since
                failures.since = now

    def left_s(self, group: str) -> float:
        """Return what is left of the deadline while a request of ``group`` is failing."""
        with self._lock:
            failures = self._failures[group]
            return self._deadline_s - failures.lost_s - (time.monotonic() - failures.since)


@final
class Retrier:
    """Retries requests.

    Args:
        max_attempts: attempts per request.
        deadline_s: deadline of one group of requests. A group is the objects below one directory of the root. Such a
            directory is one step, so a group is one save, or the reading of one checkpoint.
    """

    def __init__(self, max_attempts: int, deadline_s: float) -> None:
        self._max_attempts = max_attempts
        self._deadline_s = deadline_s
        self._budget = RetryBudget(deadline_s)
        self._random = random.Random()  # separate: all ranks seed the global one identically, for training
        self._reached = False

    def run(
        self,
        request: Callable[[], T],
        *,
        group: str,
        where: str,
        stop: threading.Event | None = None,
        max_attempts: int | None = None,
    ) -> T:
        """Return the result of ``request``, retried until it succeeds, cannot succeed, or the deadline has passed.

        Args:
            request: may be called several times.
            group: whose deadline counts.
            where: for the log.
            stop: once set, nothing is tried again.
            max_attempts: instead of the configured number.

        Raises:
            Exception: what the last attempt raised, one of :data:`nxdt_plugin_s3.faults.FAILURES`.
        """
        attempts, stop, failing = max_attempts or self._max_attempts, stop or threading.Event(), False
        try:
            for attempt in count(1):
                began = time.monotonic()
                try:
                    result = request()
                except FAILURES as error:
                    if not is_transient(error) or attempt >= attempts or stop.is_set():
                        raise
                    first = not failing and self._budget.begin(group, began)
                    left_s = self._left_s(error, group)
                    if not failing:
                        failing = True
                        self._log_retry(error, where, left_s, first=first)
                    if left_s <= 0 or stop.wait(min(left_s, self._delay_s(attempt))):
                        raise
                else:
                    self._reached = True
                    return result
        finally:
            if failing:
                self._budget.end(group)
        raise AssertionError("unreachable: counting has no end")

    def _left_s(self, error: Exception, group: str) -> float:
        left_s = self._budget.left_s(group)
        if isinstance(error, EndpointConnectionError) and not self._reached:
            return min(left_s, left_s - self._deadline_s + _FIRST_CONTACT_S)
        return left_s

    def _delay_s(self, attempt: int) -> float:
        """Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/"""
        return self._random.uniform(0, min(_LONGEST_S, _BASE_S * 2.0**attempt))

    def _log_retry(self, error: Exception, where: str, left_s: float, *, first: bool) -> None:
        """Warn once for a spell of trouble, so that a wait has a reason; the rest is for who looks closely."""
        level = logging.WARNING if first else logging.DEBUG
        _log.log(level, "%s: %s; trying again for up to %.0f s", where, redacted(error), left_s)


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
