"""Writing one object: a single request where it fits into a part, else a multipart upload with parts in parallel.

Bytes are copied once, into the buffer of the part that is being filled; a full buffer is sent as it is and comes back
for a later part. The object appears when the upload is completed, whole, or not at all.
"""

from __future__ import annotations

import io
import logging
import secrets
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, wait
from contextlib import closing
from functools import partial
from typing import Any, final

from botocore.exceptions import ClientError, IncompleteReadError

from nxdt_plugin_s3.connection import FAILURES, Connection, code_of, status_of
from nxdt_plugin_s3.errors import S3Failed, S3ObjectTooLarge

_log = logging.getLogger(__name__)
TOKEN = "nxdt-write"
"""Metadata that shows a writer that lost the response whether it wrote the existing object."""
_MOST_PARTS = 10_000
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""
_ABORT_ATTEMPTS = 3
_READ_BYTES = 2**20
"""Asked for at once of a connection."""


@final
class Body(io.RawIOBase):
    """A file on ``data``."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Return True: uploads read it."""
        return True

    def seekable(self) -> bool:
        """Return True: the SDK measures it, and seeks back to send it once more."""
        return True

    def tell(self) -> int:
        """Return the bytes before the next one to be read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1, /) -> Any:
        """Return all that is left as a view, with any ``size``: sockets take a part at once, not by 16 KiB."""
        rest = self._data[self._position :]
        self._position += len(rest)
        return rest

    def readinto(self, buffer: Any, /) -> int:
        """Copy as much as fits."""
        rest = self._data[self._position :][: len(buffer)]
        buffer[: len(rest)] = rest
        self._position += len(rest)
        return len(rest)


@final
class Upload(io.RawIOBase):
    """Stream of one object that ``open_write`` yields; :meth:`finish` or :meth:`abort` ends it.

    Args:
        connection: client of the bucket.
        name: key of the object in the bucket.
        where: address of the object, for messages.
        group: whose deadline counts.
    """

    def __init__(self, connection: Connection, name: str, where: str, group: str) -> None:
        self._connection = connection
        self._target = {"Bucket": connection.bucket, "Key": name}
        self._where = where
        self._group = group
        self._token = secrets.token_hex(16)
        self._stop = threading.Event()
        self._buffer = bytearray()  # grows up to a whole part, so that small objects take little
        self._filled = 0
        self._upload: dict[str, str] = {}
        """Bucket, key and id once it is a multipart upload."""
        self._parts: list[Future[dict[str, Any]]] = []

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Take all of ``data``; waits while as many parts are in transfer as may be.

        Raises:
            StorageError: an earlier part could not be sent.
        """
        view = memoryview(data).cast("B")
        rest, part_bytes = view, self._connection.config.part_bytes
        while rest:
            if self._filled == part_bytes:
                self._submit_part()
                self._buffer, self._filled = self._connection.take_buffer(), 0
            chunk = rest[: part_bytes - self._filled]
            end = self._filled + len(chunk)
            if len(self._buffer) < end:
                self._buffer += chunk
            else:
                with memoryview(self._buffer) as target:
                    target[self._filled : end] = chunk
            self._filled = end
            rest = rest[len(chunk) :]
        return len(view)

    def finish(self) -> None:
        """Make the object visible.

        Raises:
            StorageError: it could not be sent, or the server refuses it.
        """
        with self._connection.explained(self._where, "Writing"):
            if not self._parts:
                data, connection = memoryview(self._buffer), self._connection
                request = {**self._target, **connection.object_arguments(), **connection.checksum.arguments(data)}
                self._run(lambda: connection.client.put_object(**request, Body=Body(data)))
                return
        if self._filled:
            self._submit_part()
        with self._connection.explained(self._where, "Writing"):
            parts = [part.result() for part in self._parts]

            def complete() -> None:
                try:
                    self._connection.client.complete_multipart_upload(**self._upload, MultipartUpload={"Parts": parts})
                except FAILURES as error:  # gone: completed by an earlier attempt whose answer was lost?
                    if code_of(error) != "NoSuchUpload" or not is_ours(self._connection, self._target, self._token):
                        raise

            self._run(complete)

    def abort(self) -> None:
        """Leave nothing of the object. Never raises for the store: an upload that stays is cleaned up later."""
        self._stop.set()
        for part in self._parts:
            part.cancel()
        wait(self._parts)  # a part that arrives after the abort would stay, and be paid for
        if not self._upload:
            return
        try:
            self._run(
                lambda: self._connection.client.abort_multipart_upload(**self._upload), max_attempts=_ABORT_ATTEMPTS
            )
        except FAILURES as error:
            if code_of(error) != "NoSuchUpload":
                _log.info("an unfinished upload of %s is left for now: %s", self._where, error)

    def _submit_part(self) -> None:
        """Hand the buffer to a thread that sends it as the next part."""
        with self._connection.explained(self._where, "Writing"):
            if not self._upload:
                begin = partial(
                    self._connection.client.create_multipart_upload,
                    **self._target,
                    **self._connection.object_arguments(),
                    ChecksumAlgorithm=self._connection.checksum.algorithm,
                    Metadata={TOKEN: self._token},
                )
                self._upload = {**self._target, "UploadId": self._run(begin)["UploadId"]}
            for part in self._parts:
                if part.done():
                    part.result()
        number = len(self._parts) + 1
        if number > _MOST_PARTS:
            reason = f"S3 takes {_MOST_PARTS} parts, which are of {self._connection.config.part_bytes} bytes here"
            raise S3ObjectTooLarge(where=self._where, reason=reason)
        self._connection.slots.acquire()
        try:
            part = self._connection.threads.submit(self._send, number, self._buffer, self._filled)
        except BaseException:
            self._connection.slots.release()
            raise
        self._parts.append(part)
        part.add_done_callback(lambda _: self._connection.slots.release())

    def _send(self, number: int, buffer: bytearray, size: int) -> dict[str, Any]:
        """One part, in a thread of the connection; what the completion says of it."""
        data = memoryview(buffer)[:size]
        checksum = self._connection.checksum.arguments(data)
        request = {**self._upload, **checksum, "PartNumber": number}
        sent = self._run(lambda: self._connection.client.upload_part(**request, Body=Body(data)))
        self._connection.give_back(buffer)
        return {"PartNumber": number, "ETag": sent["ETag"], **checksum}

    def _run(self, request: Any, max_attempts: int | None = None) -> Any:
        stop = None if max_attempts else self._stop
        return self._connection.retrier.run(
            request, group=self._group, where=self._where, stop=stop, max_attempts=max_attempts
        )


def is_ours(connection: Connection, target: dict[str, str], token: str) -> bool:
    """Return whether the object that exists was written with ``token``."""
    try:
        head = connection.client.head_object(**target)
    except FAILURES as error:
        if status_of(error) == 404:
            return False
        raise
    return bool(head["Metadata"].get(TOKEN) == token)


@final
class Download(io.RawIOBase):
    """The bytes ``[start, start + length)`` of an object, to its end where ``length`` is None.

    Raises:
        FileNotFoundError: there is no such object; at its opening, or where it is deleted meanwhile.
        S3ObjectChanged: it was replaced meanwhile.
        StorageError: the server cannot be reached or refuses.
    """

    def __init__(
        self, connection: Connection, name: str, where: str, group: str, start: int, length: int | None
    ) -> None:
        self._connection = connection
        self._target = {"Bucket": connection.bucket, "Key": name}
        self._where = where
        self._group = group
        self._stop = threading.Event()
        self._part_bytes = connection.config.part_bytes
        self._ahead: deque[Future[memoryview]] = deque()
        self._range = memoryview(b"")
        """The range that :meth:`readinto` currently copies from."""
        self._position = 0
        self._next = self._end = start
        """Positions at which the next range to request begins, and at which the last one ends."""
        self._first = start
        self._body: Any = None
        """Body of the first range until it is read; its response gave the size and version of the object."""
        with connection.explained(where, "Reading"):
            self._open(length)
        while len(self._ahead) < connection.config.concurrency and self._next < self._end:
            self._fetch_ahead()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Copy what is there of a range, waiting for the next one where nothing is left."""
        if self._position == len(self._range):
            with self._connection.explained(self._where, "Reading"):
                self._turn()
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._range) - self._position)
        view[:count] = self._range[self._position : self._position + count]
        self._position += count
        return count

    def close(self) -> None:
        """Stop fetching; ranges under way are dropped."""
        self._stop.set()
        for future in self._ahead:
            future.cancel()
        if self._body is not None:
            self._body.close()
        super().close()

    def _open(self, length: int | None) -> None:
        """Ask for the first range, and learn from the answer how long the object is."""
        if length == 0:
            self._run(lambda: self._connection.client.head_object(**self._target))
            return
        end = self._first + min(length or self._part_bytes, self._part_bytes)
        try:
            answer = self._run(lambda: self._get(self._first, end))
        except ClientError as error:
            if status_of(error) == 416:  # it ends before the range begins
                return
            raise
        total = answer.get("ContentRange", "").rpartition("/")[2]
        if not total.isdecimal():
            raise S3Failed(where=self._where, reason="the server does not answer with the range that it is asked for")
        self._body, self._target["IfMatch"] = answer["Body"], answer["ETag"]
        self._end = int(total) if length is None else min(self._first + length, int(total))
        self._next = min(end, self._end)

    def _fetch_ahead(self) -> None:
        start, self._next = self._next, min(self._next + self._part_bytes, self._end)
        self._ahead.append(self._connection.threads.submit(self._fetch, start, self._next))

    def _turn(self) -> None:
        """Take the next range, or an empty one at the end."""
        used, self._range, self._position = self._range, memoryview(b""), 0
        if isinstance(used.obj, bytearray):
            self._connection.give_back(used.obj)
        if self._body is not None:
            body, self._body = self._body, None
            self._range = self._fetch(self._first, min(self._first + self._part_bytes, self._end), body)
        elif self._ahead:
            self._range = self._ahead.popleft().result()
            if self._next < self._end:
                self._fetch_ahead()

    def _get(self, start: int, end: int) -> Any:
        return self._connection.client.get_object(**self._target, Range=f"bytes={start}-{end - 1}")

    def _fetch(self, start: int, end: int, body: Any = None) -> memoryview:
        """One range; ``body`` is an answer that has begun."""
        size = end - start
        data = memoryview(self._connection.take_buffer() if size == self._part_bytes else bytearray(size))
        done = 0

        def transfer() -> None:
            nonlocal body, done
            stream, body = body or self._get(start + done, end)["Body"], None
            with closing(stream):
                while done < size:
                    if self._stop.is_set():
                        raise CancelledError
                    count = stream.readinto(data[done : done + _READ_BYTES])
                    if not count:
                        raise IncompleteReadError(actual_bytes=done, expected_bytes=size)
                    done += count

        self._run(transfer)
        return data

    def _run(self, request: Any) -> Any:
        return self._connection.retrier.run(request, group=self._group, where=self._where, stop=self._stop)
