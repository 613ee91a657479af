"""Interpret the SDK's exceptions: whether another attempt may succeed, and which error the user sees."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError

from nxdt_plugin_s3.address import Address
from nxdt_plugin_s3.errors import (
    S3AccessDenied,
    S3BucketMissing,
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


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of requests, as shown in errors."""

    address: Address
    endpoint: str
    region: str

    def explain(self, error: Exception, where: str, action: str) -> Exception:
        """Return the error that the user sees for ``error``.

        Args:
            error: one of :data:`FAILURES`.
            where: address of the object, or of the store.
            action: the attempted action, such as ``Writing``.
        """
        if isinstance(error, sdk.ClientError):
            return self._answer(error, where, action)
        if isinstance(error, _NO_CREDENTIALS):
            return S3CredentialsMissing(where=self.address.uri, reason=_credentials(error))
        if isinstance(error, _BROKEN):
            return S3Unreachable(where=where, endpoint=redacted(self.endpoint), reason=_reason(error))
        return S3Failed(where=where, reason=_reason(error))

    def _answer(self, error: sdk.ClientError, where: str, action: str) -> Exception:
        """Return the exception that an error response of the server means."""
        code, status, root = code_of(error), status_of(error), self.address.uri
        reason = _reason_of(error.response)
        if code == "NoSuchBucket":
            return S3BucketMissing(
                where=root, reason=reason, bucket=self.address.bucket, endpoint=redacted(self.endpoint)
            )
        if code in ("NoSuchKey", "404"):
            return FileNotFoundError(errno.ENOENT, "there is no such object", where)
        if code == "RequestTimeTooSkewed":
            return S3ClockSkewed(where=root, reason=reason, skew=_skew(error.response))
        if code in _ELSEWHERE:
            return S3WrongRegion(where=root, reason=reason, asked=self.region, right=_right_region(error.response))
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


def _reason_of(response: Mapping[str, Any]) -> str:
    """Code, message and id of the request; nothing else of an answer, some of which repeat what was signed."""
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    request = metadata.get("RequestId")
    reason = f"{error.get('Code', 'no code')}: {str(error.get('Message', '')).strip().rstrip('.')}"
    return f"{reason} (request {request})" if request else reason


def _credentials(error: Exception) -> str:
    if isinstance(error, sdk.NoCredentialsError):
        return "the SDK's chain (environment, shared files, role of this machine) has none"
    if isinstance(error, sdk.CredentialRetrievalError):  # its text may hold the output of a program
        return f"retrieving them from {error.kwargs.get('provider', 'their provider')} failed"
    return _reason(error)


def redacted(text: object) -> str:
    """Return ``text`` without the name and password in an endpoint's address, and without the SDK's retries."""
    return _RETRIES.sub("", _USER.sub("//", str(text)))


def _reason(error: Exception) -> str:
    return (redacted(error).strip() or type(error).__name__).rstrip(".")


def _right_region(response: Mapping[str, Any]) -> str:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    found = response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    return repr(found) if found else "the bucket's region ('aws s3api get-bucket-location --bucket …' shows it)"


def _skew(response: Mapping[str, Any]) -> str:
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return "not the server's"
    theirs = parsedate_to_datetime(date)
    seconds = (datetime.now(UTC) - theirs).total_seconds()
    return (
        f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's ({theirs:%Y-%m-%d %H:%M:%S} UTC)"
    )
