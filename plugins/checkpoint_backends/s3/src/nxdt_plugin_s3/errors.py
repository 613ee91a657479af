"""Errors of the S3 storage backend: codes ``NXDT-S100`` to ``NXDT-S119``.

Each is a kind of the core's error that it is closest to. None of them carries a credential.
"""

from __future__ import annotations

from nxdt_core.errors.checkpoints import BadStorageUri, StorageDenied, StorageError, StorageFull

__all__ = [
    "S3AccessDenied",
    "S3BadAddress",
    "S3BucketMissing",
    "S3ChecksumUnavailable",
    "S3ClockSkewed",
    "S3CredentialsMissing",
    "S3CredentialsRefused",
    "S3Failed",
    "S3ObjectChanged",
    "S3ObjectTooLarge",
    "S3Overloaded",
    "S3QuotaExceeded",
    "S3Unreachable",
    "S3WrongRegion",
]

_SAFE = "Checkpoints committed before are intact"


class S3BucketMissing(StorageError):
    """The bucket of the address does not exist."""

    code = "NXDT-S100"
    happened = "{where} cannot be used: there is no bucket {bucket!r} at {endpoint}."
    remedy = "Create the bucket, or correct checkpoint.uri (or checkpoint.storage.endpoint_url)."
    bucket: str
    endpoint: str


class S3CredentialsMissing(StorageDenied):
    """The SDK finds no credentials."""

    code = "NXDT-S101"
    happened = "There are no credentials for {where}: {reason}."
    remedy = (
        "Set AWS_PROFILE (or checkpoint.storage.profile), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run on a "
        "machine whose role may use the bucket. 'aws sts get-caller-identity' shows what the SDK finds."
    )


class S3CredentialsRefused(StorageDenied):
    """The server does not know the credentials, or they have expired."""

    code = "NXDT-S102"
    happened = "The credentials for {where} are refused: {reason}."
    remedy = "Renew the session ('aws sso login'), or correct the profile or the variables that hold them."


class S3AccessDenied(StorageDenied):
    """The credentials are good and the action is not allowed."""

    code = "NXDT-S103"
    happened = "{action} is denied at {where}: {reason}."
    remedy = (
        "Allow this role s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, s3:GetObject, s3:PutObject, "
        "s3:DeleteObject and s3:AbortMultipartUpload below the prefix, and the use of the KMS key where there is one."
    )
    action: str


class S3WrongRegion(StorageError):
    """The bucket is in another region than the request's."""

    code = "NXDT-S104"
    happened = "{where} is in another region than {asked!r}: {reason}."
    remedy = "Set checkpoint.storage.region to {right}."
    asked: str
    right: str
    """The region of the bucket in quotes, or how to find it if the server does not report it."""


class S3ClockSkewed(StorageError):
    """The clock of this machine is so wrong that signatures are refused."""

    code = "NXDT-S105"
    happened = "{where} refuses requests of this machine, whose clock is {skew}."
    remedy = "Set the clock (S3 tolerates 15 minutes): 'chronyc makestep', or 'timedatectl set-ntp true'."
    skew: str


class S3Unreachable(StorageError):
    """No connection, no answer, or one that breaks off each time."""

    code = "NXDT-S106"
    happened = "{where} cannot be reached at {endpoint}: {reason}."
    remedy = (
        f"{_SAFE}. Check checkpoint.storage.endpoint_url and region, and that this machine has a way there (DNS, a "
        "VPC endpoint, a proxy); then run the same command again."
    )
    endpoint: str


class S3BadAddress(BadStorageUri):
    """The address names no bucket, or a prefix that cannot be one."""

    code = "NXDT-S107"
    remedy = "Write s3://bucket/prefix: a bucket's name has 3 to 63 lower-case letters, digits, '-' and '.'."


class S3Overloaded(StorageError):
    """The server asks to slow down, and still does after all attempts."""

    code = "NXDT-S108"
    happened = "{where} is overloaded: {reason}."
    remedy = (
        f"{_SAFE}. Spread runs over prefixes, lower checkpoint.storage.concurrency, or give it more time "
        "(checkpoint.storage.deadline_s); then run the same command again."
    )


class S3Failed(StorageError):
    """Anything else that the server answers."""

    code = "NXDT-S109"
    remedy = f"{_SAFE}. If it persists, ask those who run the store, with the request's id where it is given."


class S3ObjectChanged(StorageError):
    """An object was replaced while it was read."""

    code = "NXDT-S110"
    happened = "{where} was replaced while it was read."
    remedy = "See that no second job writes to this checkpoint.uri, then run the same command again."


class S3QuotaExceeded(StorageFull):
    """The store or the account has no room left."""

    code = "NXDT-S111"


class S3ObjectTooLarge(StorageError):
    """An object has more bytes than its parts can hold."""

    code = "NXDT-S112"
    happened = "{where} is too large: {reason}."
    remedy = "Set a larger checkpoint.storage.part_bytes."


class S3ChecksumUnavailable(StorageError):
    """The configured checksum needs a library that is not installed."""

    code = "NXDT-S113"
    happened = "{where} cannot be written: {reason}."
    remedy = "pip install 'nxdt-plugin-s3[crt]', or set checkpoint.storage.checksum to auto."
