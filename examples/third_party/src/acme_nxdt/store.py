"""Checkpoints in one SQLite file. A transaction a write makes it atomic, which is all that nxdt asks of a store."""

import io
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

from nxdt_core.errors.checkpoints import BadStorageKey
from nxdt_core.protocols.store import CheckpointStore, ObjectInfo

_TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB NOT NULL, modified REAL NOT NULL)"
_LONGEST = 2**31 - 1


class SQLiteStore(CheckpointStore):
    """``sqlite://PATH``: a row an object, at most 1 GB each (SQLite's own limit)."""

    def __init__(self, uri: str, config: None = None) -> None:
        self.uri = uri
        self.path = Path(uri.removeprefix("sqlite://"))
        self.path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        """Open a separate connection for each call: any thread and process may write; SQLite queues them."""
        with closing(sqlite3.connect(self.path, timeout=60.0)) as connection, connection:
            connection.execute(_TABLE)
            yield connection

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """Collect the object and insert it in one transaction; after an exception nothing is inserted."""
        stream = io.BytesIO()
        _check(key)
        yield stream
        with self._session() as session:
            session.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", (key, stream.getvalue(), time.time()))

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """Read a range; the database cuts it, so that no more than the range is in memory."""
        query = "SELECT substr(data, ?, ?) FROM objects WHERE key = ?"
        with self._session() as session:
            span = (start + 1, _LONGEST if length is None else length)
            row = session.execute(query, (*span, _check(key))).fetchone()
        if row is None:
            raise FileNotFoundError(f"{self.uri}: no object {key!r}")
        yield io.BytesIO(row[0])

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time of one object."""
        return next((info for info in self.list(_check(key)) if info.key == key), None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, sorted."""
        query = "SELECT key, length(data), modified FROM objects WHERE substr(key, 1, ?) = ? ORDER BY key"
        with self._session() as session:
            rows = session.execute(query, (len(prefix), prefix)).fetchall()
        for key, size_bytes, modified in rows:
            yield ObjectInfo(key=key, size_bytes=size_bytes, modified=modified)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete in one transaction."""
        with self._session() as session:
            session.executemany("DELETE FROM objects WHERE key = ?", [(_check(key),) for key in keys])

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Insert unless the key exists; the primary key decides which writer was first."""
        with self._session() as session:
            row = (_check(key), data, time.time())
            return session.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?)", row).rowcount == 1

    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """One statement, so no other writer comes between the comparison and the replacement."""
        with self._session() as session:
            row = (data, time.time(), _check(key), expected)
            return (
                session.execute("UPDATE objects SET data = ?, modified = ? WHERE key = ? AND data = ?", row).rowcount
                == 1
            )


def _check(key: str) -> str:
    """The key itself, where it is a relative path of names."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise BadStorageKey(where=key, reason="it must be names joined by '/'")
    return key
