"""Multipart uploads that nobody will complete: a killed writer leaves parts that do not show and are paid for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from nxdt_plugin_s3.faults import FAILURES
from nxdt_plugin_s3.link import Link

__all__ = ["sweep"]

_log = logging.getLogger(__name__)


def sweep(link: Link, prefix: str, older_than_s: float) -> int:
    """Abort uploads of objects whose names begin with ``prefix``, begun longer ago than ``older_than_s`` by the
    server's clock.

    Returns:
        How many. What goes wrong is logged, and waits for the next time.
    """
    aborted = 0
    try:
        for upload, now in _uploads(link, prefix):
            if upload["Initiated"] < now - timedelta(seconds=older_than_s):
                link.client.abort_multipart_upload(Bucket=link.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted += 1
    except FAILURES as error:
        _log.warning("abandoned uploads below s3://%s/%s are left for now: %s", link.bucket, prefix, error)
    return aborted


def _uploads(link: Link, prefix: str) -> Iterator[tuple[dict[str, Any], datetime]]:
    """Each upload and the time at which the server said so."""
    for page in link.client.get_paginator("list_multipart_uploads").paginate(Bucket=link.bucket, Prefix=prefix):
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        yield from ((upload, now) for upload in page.get("Uploads", []))
