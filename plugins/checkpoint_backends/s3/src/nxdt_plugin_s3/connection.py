"""The client of S3: its checksums, and retries with jitter and with one deadline for all requests of a save.

Why not the SDK's own retries: they know neither a deadline nor each other, so that a store that fails for every object
delays a save by (objects × attempts); and they draw from Python's global random generator, whose state a training run
saves and restores.
"""

from __future__ import annotations

import base64
import errno
import logging
import random
import re
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib import import_module
from typing import Any, Self, TypeVar, final

import botocore.session
from botocore import exceptions as sdk
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from nxdt_core.errors.checkpoints import BadStorageKey
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.errors import (
    S3AccessDenied,
    S3BadAddress,
    S3BucketMissing,
    S3ChecksumUnavailable,
    S3ClockSkewed,
    S3CredentialsMissing,
    S3CredentialsRefused,
    S3Failed,
    S3ObjectChanged,
    S3Overloaded,
    S3QuotaExceeded,
    S3Unreachable,
    S3WrongRegion,
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP = re.compile(r"\d+\.\d+\.\d+\.\d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
"""Characters that XML, the format of listings and deletions, cannot contain."""
_NAME_BYTES = 1024
"""Longest name of an object, https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""


FAILURES = (sdk.ClientError, sdk.BotoCoreError, ResponseParserError)
"""Exceptions that the SDK raises for failures on the network or on the server."""
_USER = re.compile(r"//[^/@\s]*@")
_RETRIES = re.compile(r" \(reached max retries: \d+\)")
"""The number of attempts that the SDK reports. It makes only one; the plugin retries."""
_BROKEN = (sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError, ResponseParserError)
_NO_CREDENTIALS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.ProfileNotFound,
    sdk.NoAuthTokenError,
    sdk.SSOError,
    sdk.TokenRetrievalError,
)
_THROTTLED = frozenset({"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests"})
_TRANSIENT = _THROTTLED | {
    "InternalError",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",  # a bit flipped on the way: the next copy may arrive whole
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
}
_REFUSED = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
)
_FULL = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
T = TypeVar("T")
_log = logging.getLogger(__name__)
_BASE_S, _LONGEST_S = 0.1, 10.0
_FIRST_CONTACT_S = 15.0
"""A host that never answered is more likely misspelt than down; a person waits for that message."""
_CALLERS = 32
"""Connections beyond those of parts and ranges, for threads that call the store at once."""
_descriptions = cache(create_loader)
"""Returns the SDK's descriptions of its services below a path, which all clients of a process share: reading them takes
0.08 CPU-seconds, six times as long as the rest of a client."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a store."""

    bucket: str
    prefix: str
    """Prefix of the names of all its objects: empty, or ends with ``/``."""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Take an address apart.

        Raises:
            S3BadAddress: it names no bucket, or cannot be the beginning of an object's name.
        """
        scheme, separator, rest = uri.partition("://")
        if scheme.lower() != "s3" or not separator:
            raise S3BadAddress(where=uri, reason="it does not begin with s3://")
        bucket, _, path = rest.partition("/")
        if "@" in bucket:
            hidden = f"s3://…@{bucket.rpartition('@')[2]}"
            raise S3BadAddress(where=hidden, reason="credentials do not belong there; they come from the SDK's chain")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IP.fullmatch(bucket):
            raise S3BadAddress(where=uri, reason=f"{bucket!r} cannot be the name of a bucket")
        path = path.rstrip("/")
        if path and (problem := _problem(path)):
            raise S3BadAddress(where=uri, reason=problem)
        return cls(bucket, f"{path}/" if path else "")

    @property
    def uri(self) -> str:
        """The address as it is shown, without a slash at its end."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def where(self, key: str) -> str:
        """Return an object's address for messages."""
        return f"{self.uri}/{key}"

    def name_of(self, key: str) -> str:
        """Return the object of a key.

        Raises:
            BadStorageKey: it leaves the prefix, or S3 cannot hold it.
        """
        name = self.prefix + key
        problem = _problem(key)
        if not problem and len(name.encode()) > _NAME_BYTES:
            problem = f"with the prefix it has more than {_NAME_BYTES} bytes"
        if problem:
            raise BadStorageKey(where=key, reason=problem)
        return name


def _problem(path: str) -> str | None:
    """Return why ``path`` does not consist of names joined by '/'; None where it does."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it must be names joined by '/', without '..' and empty ones"
    return "it holds a control character" if _CONTROL.search(path) else None


def code_of(error: BaseException) -> str:
    """Return the server's code (``NoSuchKey``), its status as text where an answer has no body, "" where it gave
    none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, sdk.ClientError) else ""


def status_of(error: BaseException) -> int:
    """Return the status of the server's answer, 0 where there was none."""
    metadata = error.response.get("ResponseMetadata", {}) if isinstance(error, sdk.ClientError) else {}
    return int(metadata.get("HTTPStatusCode", 0))


def no_such_key(error: BaseException) -> bool:
    """Return whether the object is missing, and not the whole bucket."""
    return status_of(error) == 404 and code_of(error) != "NoSuchBucket"


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    if isinstance(error, sdk.ClientError):
        status = status_of(error)
        return code_of(error) in _TRANSIENT or status in (408, 429) or (status >= 500 and status not in (501, 507))
    if isinstance(error, sdk.SSLError):
        return False
    return isinstance(error, (*_BROKEN, sdk.CredentialRetrievalError))


def redacted(text: object) -> str:
    """Return ``text`` without the name and password in an endpoint's address, and without the SDK's retries."""
    return _RETRIES.sub("", _USER.sub("//", str(text)))


def _reason(error: Exception) -> str:
    return (redacted(error).strip() or type(error).__name__).rstrip(".")


@dataclass(frozen=True, slots=True)
class Checksum:
    """One algorithm; all of them give the GIL up, or take half a millisecond for 16 MiB."""

    algorithm: str
    """Name of the algorithm in S3, such as ``CRC32C``."""
    compute: Callable[[bytes | memoryview], int]

    def arguments(self, data: bytes | memoryview) -> dict[str, str]:
        """Return what a request that carries ``data`` says of it."""
        digest = self.compute(data).to_bytes(8 if self.algorithm == "CRC64NVME" else 4, "big")
        return {f"Checksum{self.algorithm}": base64.b64encode(digest).decode()}


def choose(name: str, where: str) -> Checksum:
    """Return the algorithm of ``checkpoint.storage.checksum``; ``where``: address of the store, for messages.

    Raises:
        S3ChecksumUnavailable: it needs awscrt, which is not installed.
    """
    try:
        crt = None if name == "crc32" else import_module("awscrt.checksums")
    except ModuleNotFoundError as error:
        if name != "auto":
            reason = f"the checksum {name} needs awscrt, which is not installed"
            raise S3ChecksumUnavailable(where=where, reason=reason) from error
        crt = None
    if crt is None:
        return Checksum("CRC32", zlib.crc32)
    algorithm = "crc32c" if name == "auto" else name
    return Checksum(algorithm.upper(), getattr(crt, algorithm))


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
            Exception: what the last attempt raised, one of :data:`nxdt_plugin_s3.connection.FAILURES`.
        """
        attempts, stop, failing = max_attempts or self._max_attempts, stop or threading.Event(), False
        attempt = 0
        try:
            while True:
                attempt += 1
                began = time.monotonic()
                try:
                    result = request()
                except FAILURES as error:
                    if not is_transient(error) or attempt >= attempts or stop.is_set():
                        raise
                    first = not failing and self._budget.begin(group, began)
                    left_s = self._budget.left_s(group)
                    if isinstance(error, sdk.EndpointConnectionError) and not self._reached:
                        left_s = min(left_s, left_s - self._deadline_s + _FIRST_CONTACT_S)
                    if not failing:  # one warning for a spell of trouble, so that a wait has a reason
                        failing, level = True, logging.WARNING if first else logging.DEBUG
                        _log.log(level, "%s: %s; trying again for up to %.0f s", where, redacted(error), left_s)
                    # Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
                    delay_s = self._random.uniform(0, min(_LONGEST_S, _BASE_S * 2.0**attempt))
                    if left_s <= 0 or stop.wait(min(left_s, delay_s)):
                        raise
                else:
                    self._reached = True
                    return result
        finally:
            if failing:
                self._budget.end(group)


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
        self._address = address
        self._endpoint, self._region = config.endpoint_url or "AWS", config.region or "the SDK's default"
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
        with self.explained(address.uri, "Connecting"):
            self.client: Any = sdk_session(config.profile).create_client(
                "s3", region_name=config.region, endpoint_url=config.endpoint_url, config=settings
            )
        self._endpoint, self._region = self.client.meta.endpoint_url, self.client.meta.region_name
        self.checksum = choose(config.checksum, address.uri)
        self.retrier = Retrier(config.max_attempts, config.deadline_s)
        self.threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="nxdt-s3")
        self.slots = threading.BoundedSemaphore(config.concurrency)
        """One for each part in transfer: what bounds the memory of writing."""
        self._spare: deque[bytearray] = deque(maxlen=config.concurrency)

    @contextmanager
    def explained(self, where: str, action: str) -> Iterator[None]:
        """Turn what the SDK raises into errors for a user.

        Args:
            where: address of the object, or of the store.
            action: the attempted action, such as ``Writing``.
        """
        try:
            yield
        except sdk.ClientError as error:
            raise self._answer(error, where, action) from error
        except _NO_CREDENTIALS as error:
            reason = _reason(error)
            if isinstance(error, sdk.NoCredentialsError):
                reason = "the SDK's chain (environment, shared files, role of this machine) has none"
            elif isinstance(error, sdk.CredentialRetrievalError):  # its text may hold the output of a program
                reason = f"retrieving them from {error.kwargs.get('provider', 'their provider')} failed"
            raise S3CredentialsMissing(where=self._address.uri, reason=reason) from error
        except _BROKEN as error:
            raise S3Unreachable(where=where, endpoint=redacted(self._endpoint), reason=_reason(error)) from error
        except FAILURES as error:
            raise S3Failed(where=where, reason=_reason(error)) from error

    def _answer(self, error: sdk.ClientError, where: str, action: str) -> Exception:
        """Return the exception that an error response of the server means."""
        code, status, root = code_of(error), status_of(error), self._address.uri
        # Code, message and id of the request; nothing else of an answer, some of which repeat what was signed.
        detail, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        reason = f"{detail.get('Code', 'no code')}: {str(detail.get('Message', '')).strip().rstrip('.')}"
        if metadata.get("RequestId"):
            reason = f"{reason} (request {metadata['RequestId']})"
        headers = metadata.get("HTTPHeaders", {})
        if code == "NoSuchBucket":
            return S3BucketMissing(
                where=root, reason=reason, bucket=self._address.bucket, endpoint=redacted(self._endpoint)
            )
        if code in ("NoSuchKey", "404"):
            return FileNotFoundError(errno.ENOENT, "there is no such object", where)
        if code == "RequestTimeTooSkewed":
            skew = "not the server's"
            if headers.get("date"):
                theirs = parsedate_to_datetime(headers["date"])
                seconds = (datetime.now(UTC) - theirs).total_seconds()
                side = "ahead of" if seconds > 0 else "behind"
                skew = f"{abs(seconds):.0f} s {side} the server's ({theirs:%Y-%m-%d %H:%M:%S} UTC)"
            return S3ClockSkewed(where=root, reason=reason, skew=skew)
        if code in _ELSEWHERE:
            region = detail.get("Region") or headers.get("x-amz-bucket-region")
            how = "the bucket's region ('aws s3api get-bucket-location --bucket …' shows it)"
            return S3WrongRegion(where=root, reason=reason, asked=self._region, right=repr(region) if region else how)
        if code in _REFUSED:
            return S3CredentialsRefused(where=root, reason=reason)
        if status == 412:
            return S3ObjectChanged(where=where, reason=reason)
        if code in _FULL or status == 507:
            return S3QuotaExceeded(where=where, reason=reason)
        if status == 403:
            return S3AccessDenied(where=where, reason=reason, action=action)
        if code in _THROTTLED or status in (429, 503):
            return S3Overloaded(where=where, reason=reason)
        return S3Failed(where=where, reason=reason)

    def object_arguments(self) -> dict[str, str]:
        """Return what each new object is given: encryption and storage class."""
        arguments = {
            "ServerSideEncryption": self.config.server_side_encryption,
            "SSEKMSKeyId": self.config.kms_key_id,
            "StorageClass": self.config.storage_class,
        }
        return {name: value for name, value in arguments.items() if value is not None}

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


def sdk_session(profile: str | None = None) -> Any:
    """Return a new session of the SDK with its own credentials and settings."""
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session
