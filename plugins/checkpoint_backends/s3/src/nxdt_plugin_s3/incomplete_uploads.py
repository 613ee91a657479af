"""Multipart uploads that no process will complete: a killed writer leaves parts that do not show and are paid for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from nxdt_plugin_s3.connection import Connection
from nxdt_plugin_s3.faults import FAILURES

__all__ = ["abort_incomplete_uploads"]

_log = logging.getLogger(__name__)


def abort_incomplete_uploads(connection: Connection, prefix: str, older_than_s: float) -> int:
    """Abort uploads of objects whose names begin with ``prefix``, begun longer ago than ``older_than_s`` by the
    server's clock.

    Returns:
        How many. What goes wrong is logged, and waits for the next time.
    """
    aborted = 0
    try:
        for upload, now in _uploads(connection, prefix):
            if upload["Initiated"] < now - timedelta(seconds=older_than_s):
                connection.client.abort_multipart_upload(
                    Bucket=connection.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                aborted += 1
    except FAILURES as error:
        _log.warning("abandoned uploads below s3://%s/%s are left for now: %s", connection.bucket, prefix, error)
    return aborted


def _uploads(connection: Connection, prefix: str) -> Iterator[tuple[dict[str, Any], datetime]]:
    """Each upload and the time at which the server said so."""
    for page in connection.client.get_paginator("list_multipart_uploads").paginate(
        Bucket=connection.bucket, Prefix=prefix
    ):
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        yield from ((upload, now) for upload in page.get("Uploads", []))
