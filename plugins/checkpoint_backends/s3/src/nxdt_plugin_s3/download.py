"""Reading one object as a stream: in ranges, some of which are fetched ahead, in parallel.

All ranges are of one version of the object. A range whose transfer breaks off resumes at the byte where it stopped.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import closing
from typing import Any, final

from botocore.exceptions import ClientError, IncompleteReadError

from nxdt_plugin_s3.connection import Connection
from nxdt_plugin_s3.errors import S3Failed
from nxdt_plugin_s3.faults import status_of

_READ_BYTES = 2**20
"""Asked for at once of a connection."""


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
