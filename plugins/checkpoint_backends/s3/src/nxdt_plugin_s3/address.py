"""``s3://bucket/prefix``: its parts, and the way from keys to names of objects and back. Nothing in it is decoded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from nxdt_core.errors.checkpoints import BadStorageKey
from nxdt_plugin_s3.errors import S3BadAddress

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP = re.compile(r"\d+\.\d+\.\d+\.\d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
"""Characters that XML, the format of listings and deletions, cannot contain."""
_NAME_BYTES = 1024
"""Longest name of an object, https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""


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

    def key_of(self, name: str) -> str:
        """Return the inverse of :meth:`name_of`."""
        return name.removeprefix(self.prefix)


def _problem(path: str) -> str | None:
    """Return why ``path`` does not consist of names joined by '/'; None where it does."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it must be names joined by '/', without '..' and empty ones"
    return "it holds a control character" if _CONTROL.search(path) else None
