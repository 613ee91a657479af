"""Errors of the S3 storage backend: codes ``NXDT-S100`` to ``NXDT-S119``.

Each is a kind of the core's error that it is closest to. None of them carries a credential.
"""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageDenied, StorageError, StorageFull

_SAFE = "Checkpoints committed before are intact"

S3BucketMissing = StorageError.define(
    "NXDT-S100",
    "The bucket of the address does not exist.",
    "{where} cannot be used: there is no bucket {bucket!r} at {endpoint}.",
    "Create the bucket, or correct checkpoint.uri (or checkpoint.storage.endpoint_url).",
)

S3CredentialsMissing = StorageDenied.define(
    "NXDT-S101",
    "The SDK finds no credentials.",
    "There are no credentials for {where}: {reason}.",
    "Set AWS_PROFILE (or checkpoint.storage.profile), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run on a "
    "machine whose role may use the bucket. 'aws sts get-caller-identity' shows what the SDK finds.",
)

S3CredentialsRefused = StorageDenied.define(
    "NXDT-S102",
    "The server does not know the credentials, or they have expired.",
    "The credentials for {where} are refused: {reason}.",
    "Renew the session ('aws sso login'), or correct the profile or the variables that hold them.",
)

S3AccessDenied = StorageDenied.define(
    "NXDT-S103",
    "The credentials are good and the action is not allowed.",
    "{action} is denied at {where}: {reason}.",
    "Allow this role s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload below the prefix, and the use of the KMS key where there is one.",
)

S3WrongRegion = StorageError.define(
    "NXDT-S104",
    "The bucket is in another region than the request's.",
    "{where} is in another region than {asked!r}: {reason}.",
    "Set checkpoint.storage.region to {right}.",
)

S3ClockSkewed = StorageError.define(
    "NXDT-S105",
    "The clock of this machine is so wrong that signatures are refused.",
    "{where} refuses requests of this machine, whose clock is {skew}.",
    "Set the clock (S3 tolerates 15 minutes): 'chronyc makestep', or 'timedatectl set-ntp true'.",
)

S3Unreachable = StorageError.define(
    "NXDT-S106",
    "No connection, no answer, or one that breaks off each time.",
    "{where} cannot be reached at {endpoint}: {reason}.",
    f"{_SAFE}. Check checkpoint.storage.endpoint_url and region, and that this machine has a way there (DNS, a "
    "VPC endpoint, a proxy); then run the same command again.",
)

S3BadAddress = StorageError.define(
    "NXDT-S107",
    "The address names no bucket, or a prefix that cannot be one.",
    "{where!r} is not an address for checkpoints: {reason}.",
    "Write s3://bucket/prefix: a bucket's name has 3 to 63 lower-case letters, digits, '-' and '.'.",
)

S3Overloaded = StorageError.define(
    "NXDT-S108",
    "The server asks to slow down, and still does after all attempts.",
    "{where} is overloaded: {reason}.",
    f"{_SAFE}. Spread runs over prefixes, lower checkpoint.storage.concurrency, or give it more time "
    "(checkpoint.storage.deadline_s); then run the same command again.",
)

S3Failed = StorageError.define(
    "NXDT-S109",
    "Anything else that the server answers.",
    "The checkpoint store failed at {where}: {reason}.",
    f"{_SAFE}. If it persists, ask those who run the store, with the request's id where it is given.",
)

S3ObjectChanged = StorageError.define(
    "NXDT-S110",
    "An object was replaced while it was read.",
    "{where} was replaced while it was read.",
    "See that no second job writes to this checkpoint.uri, then run the same command again.",
)

S3QuotaExceeded = StorageFull.define(
    "NXDT-S111",
    "The store or the account has no room left.",
    "No space is left for {where}: {reason}.",
    StorageFull.remedy,
)

S3ObjectTooLarge = StorageError.define(
    "NXDT-S112",
    "An object has more bytes than its parts can hold.",
    "{where} is too large: {reason}.",
    "Set a larger checkpoint.storage.part_bytes.",
)

S3ChecksumUnavailable = StorageError.define(
    "NXDT-S113",
    "The configured checksum needs a library that is not installed.",
    "{where} cannot be written: {reason}.",
    "pip install 'nxdt-plugin-s3[crt]', or set checkpoint.storage.checksum to auto.",
)
