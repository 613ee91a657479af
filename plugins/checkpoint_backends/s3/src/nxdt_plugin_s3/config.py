"""The section ``checkpoint.storage`` of the S3 store. Importing this costs nothing: no SDK, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from nxdt_core.config.section import PositiveInt, Range, Section

Seconds = Annotated[float, Range(0.001)]
_SMALLEST_PART = 5 * 2**20
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
_LARGEST_PART = 5 * 2**30


class S3StorageConfig(Section):
    """Settings for writing objects to S3 and reading them.

    Credentials are not keys of it: they come from the SDK's own chain (environment, shared files, container or instance
    role), which also reads ``AWS_PROFILE``, ``AWS_REGION`` and ``AWS_ENDPOINT_URL_S3``.
    """

    endpoint_url: str | None = None
    """Address of a store that is not AWS, such as ``https://minio.example:9000``; null leaves it to the SDK."""
    region: str | None = None
    """Region of the bucket; null leaves it to the SDK."""
    profile: str | None = None
    """Profile of the SDK's shared configuration files; null leaves it to the SDK."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Position of the bucket's name in URLs: in the path, or before the host name."""
    server_side_encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Encryption that is asked for with each object; null leaves it to the bucket."""
    kms_key_id: str | None = None
    """Key for ``server_side_encryption: aws:kms``; null takes the account's own."""
    storage_class: str | None = None
    """Storage class of the objects, such as ``INTELLIGENT_TIERING``; null means ``STANDARD``."""
    checksum: Literal["auto", "crc32", "crc32c", "crc64nvme"] = "auto"
    """Checksum that the server verifies for each part. ``auto``: CRC-32C where awscrt is installed, else CRC-32."""
    part_bytes: PositiveInt = 16 * 2**20
    """Larger objects are written in parts, and read in ranges, of this size."""
    concurrency: PositiveInt = 8
    """Parts and ranges in transfer at once, of all objects of this process. A process holds at most this many parts in
    memory for writing, and one more for each object that is being written; reading holds as many for each object that
    is being read."""
    connect_timeout_s: Seconds = 30.0
    """Longest wait for a connection, and for one part to be sent over it."""
    read_timeout_s: Seconds = 60.0
    """Longest silence of the server while its answer is awaited or read."""
    max_attempts: PositiveInt = 25
    """Times that one request is tried, unless the deadline ends that before."""
    deadline_s: Seconds = 180.0
    """Seconds that failures may cost one save (or the reading of one checkpoint) in this process altogether: time
    during which any of its requests is being tried again. Once it is used up, the next failure ends the save."""
    abandoned_after_s: Seconds = 24 * 3600.0
    """Age at which a multipart upload below ``checkpoint.uri`` counts as that of a killed writer; such are deleted
    after each commit."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any store, as (key, message)."""
        if not _SMALLEST_PART <= self.part_bytes <= _LARGEST_PART:
            yield "part_bytes", f"{self.part_bytes} is outside of what S3 takes: {_SMALLEST_PART} (5 MiB) to 5 GiB"
        if self.kms_key_id and (self.server_side_encryption or "").partition(":")[0] != "aws":
            yield "kms_key_id", "it needs server_side_encryption: aws:kms (or aws:kms:dsse)"
        if self.endpoint_url is not None:
            split = urlsplit(self.endpoint_url)
            if split.scheme not in ("http", "https") or not split.hostname:
                yield "endpoint_url", "it must begin with http:// or https:// and name a host"
            if "@" in split.netloc:
                yield "endpoint_url", "a name or password does not belong here; credentials come from the SDK's chain"
