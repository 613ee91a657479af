"""The store of checkpoints in S3: one object per key, below the prefix of the address.

An object is visible once its upload is completed, whole, and then for every reader (S3 has been strongly consistent
since 2020). ``put_if_absent`` and ``put_if_match`` are conditional PUTs (AWS has the latter since November 2024). Any
store with these properties will do.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO, cast

from botocore.exceptions import ClientError

from nxdt_core.protocols.store import CheckpointStore, ObjectInfo
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.connection import FAILURES, Address, Connection, is_transient, no_such_key, status_of
from nxdt_plugin_s3.errors import S3Failed
from nxdt_plugin_s3.transfer import TOKEN, Download, Upload, is_ours

_log = logging.getLogger(__name__)


_MOST_DELETIONS = 1000
"""Limit of one request, https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html"""


class S3Storage(CheckpointStore):
    """Objects of a bucket: ``s3://bucket/prefix``. Nothing is asked of the server before the first use.

    Raises :class:`StorageError` subclasses with codes ``NXDT-S100`` on, which name what to do.
    """

    def __init__(self, uri: str, config: S3StorageConfig | None = None) -> None:
        self._address = Address.parse(uri)
        self._config = config or S3StorageConfig()
        self.uri = self._address.uri
        self._connections: dict[int, Connection] = {}
        self._locks: dict[int, threading.Lock] = {}
        """Locks by process: a forked one makes its own, in any state of its parent's."""

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        name = self._address.name_of(key)
        upload = Upload(self._connection(), name, self._address.where(key), _group(key))
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        name = self._address.name_of(key)
        raw = Download(self._connection(), name, self._address.where(key), _group(key), start, length)
        with io.BufferedReader(raw) as stream:
            yield cast(BinaryIO, stream)

    def stat(self, key: str) -> ObjectInfo | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        name, connection = self._address.name_of(key), self._connection()
        with connection.explained(self._address.where(key), "Reading"):
            try:
                head = self._run(key, lambda: connection.client.head_object(Bucket=connection.bucket, Key=name))
            except ClientError as error:
                if status_of(error) == 404:
                    return None
                if status_of(error) < 500:
                    # An answer to HEAD has no body; the same trouble meets a request whose answer has one.
                    connection.client.list_objects_v2(Bucket=connection.bucket, Prefix=name, MaxKeys=1)
                raise
        return ObjectInfo(key=key, size_bytes=head["ContentLength"], modified=head["LastModified"].timestamp())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        connection, root = self._connection(), self._address.prefix
        request = {"Bucket": self._address.bucket, "Prefix": root + prefix}
        objects, tokens = [], set[str | None]({None})
        with connection.explained(self.uri, "Listing"):
            while True:
                page = self._run(prefix, lambda: connection.client.list_objects_v2(**request))
                for entry in page.get("Contents", []):
                    key, modified = entry["Key"].removeprefix(root), entry["LastModified"].timestamp()
                    if key and not key.endswith("/"):  # consoles make objects of such names, to show folders
                        objects.append(ObjectInfo(key=key, size_bytes=entry["Size"], modified=modified))
                if not page.get("IsTruncated"):
                    break
                token = page.get("NextContinuationToken")
                if token in tokens:
                    reason = f"the server announces another page and gives the continuation token {token!r}"
                    raise S3Failed(where=self.uri, reason=f"{reason}, which is not a new one")
                tokens.add(token)
                request["ContinuationToken"] = token
        yield from sorted(objects, key=lambda info: info.key)  # directory buckets do not sort

    def delete_many(self, keys: Iterable[str]) -> None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        rest = iter(keys)
        while batch := tuple(islice(rest, _MOST_DELETIONS)):
            names = [self._address.name_of(key) for key in batch]
            with self._connection().explained(self.uri, "Deleting"):
                self._delete(batch[0], names)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`.

        Right also where an answer is lost and the request repeated: the object then carries this call's token.
        """
        return self._put_if(key, data, lambda target: {"IfNoneMatch": "*"})

    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`.

        The server compares the entity tag that ``expected`` was read with, at the moment of the replacement.
        """

        def condition(target: dict[str, str]) -> dict[str, str] | None:
            try:
                answer = self._connection().client.get_object(**target)
            except ClientError as error:
                if no_such_key(error):
                    return None
                raise
            with answer["Body"] as body:  # read without a limit: only then does the SDK notice an answer cut short
                same = answer["ContentLength"] == len(expected) and body.read() == expected
                return {"IfMatch": answer["ETag"]} if same else None

        return self._put_if(key, data, condition)

    def after_commit(self, prefix: str) -> None:
        """Delete uploads below the address that killed writers left unfinished."""
        client, bucket = self._connection().client, self._address.bucket
        age = timedelta(seconds=self._config.abandoned_after_s)
        try:
            pages = client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=bucket, Prefix=self._address.prefix):
                date = page["ResponseMetadata"]["HTTPHeaders"].get("date")  # the server's clock decides
                now = parsedate_to_datetime(date) if date else datetime.now(UTC)
                for upload in page.get("Uploads", []):
                    if upload["Initiated"] < now - age:
                        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except FAILURES as error:  # wait for the next time
            where = f"s3://{bucket}/{self._address.prefix}"
            _log.warning("abandoned uploads below %s are left for now: %s", where, error)

    def _connection(self) -> Connection:
        process = os.getpid()
        with self._locks.setdefault(process, threading.Lock()):
            if process not in self._connections:
                self._connections[process] = Connection(self._address, self._config)
            return self._connections[process]

    def _run(self, key: str, request: Any) -> Any:
        return self._connection().retrier.run(request, group=_group(key), where=self._address.where(key))

    def _put_if(self, key: str, data: bytes, condition: Callable[[dict[str, str]], dict[str, str] | None]) -> bool:
        """Put an object under a condition of the server's; ``condition`` gives None where it cannot be met any more."""
        connection, token, name = self._connection(), secrets.token_hex(16), self._address.name_of(key)
        target = {"Bucket": connection.bucket, "Key": name}
        arguments = {**connection.object_arguments(), **connection.checksum.arguments(data), "Metadata": {TOKEN: token}}
        sent = 0

        def put() -> bool:
            nonlocal sent
            sent_before, header = sent, condition(target)
            if header is not None:
                sent += 1
                try:
                    connection.client.put_object(**target, **arguments, **header, Body=data)
                except ClientError as error:
                    if status_of(error) != 412 and not no_such_key(error):
                        raise
                else:
                    return True
            return sent_before > 0 and is_ours(connection, target, token)

        with connection.explained(self._address.where(key), "Writing"):
            return bool(self._run(key, put))

    def _delete(self, key: str, names: Sequence[str]) -> None:
        """Delete objects with one request; those that the server could not delete just now are tried again."""
        connection, left = self._connection(), names

        def request() -> None:
            nonlocal left
            objects = {"Objects": [{"Key": name} for name in left], "Quiet": True}
            failed = connection.client.delete_objects(Bucket=connection.bucket, Delete=objects).get("Errors", [])
            if failed:
                left = [error["Key"] for error in failed]
                others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
                errors = []  # each as if its object had been asked for alone: the answer is a success as a whole
                for error in failed:
                    message = f"{error.get('Message', '')} ({error['Key']}{others})"
                    shown = {"Code": error.get("Code", ""), "Message": message}
                    metadata = {"HTTPStatusCode": 403 if shown["Code"] == "AccessDenied" else 200}
                    errors.append(ClientError({"Error": shown, "ResponseMetadata": metadata}, "DeleteObjects"))
                raise next((error for error in errors if not is_transient(error)), errors[0])

        self._run(key, request)


def _group(key: str) -> str:
    """Objects that share one deadline: those of a step."""
    return key.partition("/")[0]
