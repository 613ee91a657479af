"""Claim: objects go to S3 and come back at 0.9 or more of the rate of boto3's own multipart transfers.

Our store against ``upload_fileobj`` and ``download_fileobj``, with the same part size and concurrency, on one real
server on this machine, by turns. Each row gives the median of the paired ratios of rates (ours / boto3's; above 1 ours
is faster) and their quartiles, by wall time and by CPU time of this process.

    python benchmarks/checkpoints/s3.py [--size-mib 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3.session
from boto3.s3.transfer import TransferConfig
from nxdt_plugin_s3.config import S3StorageConfig
from nxdt_plugin_s3.storage import S3Storage

from tests.s3_server import BUCKET, ENVIRONMENT, S3Server

PIECE_BYTES = 8 * 2**20
"""As the checkpoint code writes and reads: blocks of its digests."""
TARGET = 0.9
Way = Callable[[], None]


def main() -> int:
    """Print the table; status 1 where a median ratio of wall times is below the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=S3StorageConfig().concurrency)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    data = memoryview(os.urandom(options.size_mib * 2**20))
    slow = False
    with tempfile.TemporaryDirectory() as directory, S3Server(Path(directory)) as server:
        config = S3StorageConfig(endpoint_url=server.url, concurrency=options.concurrency)
        for name, ours, theirs in ways(config, data):
            slow |= report(name, ours, theirs, options.rounds, len(data)) < TARGET
    return int(slow)


def ways(config: S3StorageConfig, data: memoryview) -> list[tuple[str, Way, Way]]:
    """Name, our way and boto3's way of each direction."""
    storage = S3Storage(f"s3://{BUCKET}/bench", config)
    client = boto3.session.Session().client("s3", endpoint_url=config.endpoint_url)
    plain: dict[str, Any] = {
        "Bucket": BUCKET,
        "Key": "bench/plain",
        "Config": TransferConfig(
            multipart_threshold=config.part_bytes,
            multipart_chunksize=config.part_bytes,
            max_concurrency=config.concurrency,
        ),
    }

    source = io.BytesIO(data)

    def write() -> None:
        with storage.open_write("ours") as stream:
            for start in range(0, len(data), PIECE_BYTES):
                stream.write(data[start : start + PIECE_BYTES])

    def read() -> None:
        buffer = bytearray(PIECE_BYTES)
        with storage.open_read("ours") as stream:
            while stream.readinto(buffer):
                pass

    def upload() -> None:
        source.seek(0)
        client.upload_fileobj(Fileobj=source, **plain)

    def download() -> None:
        with open(os.devnull, "wb") as sink:
            client.download_fileobj(Fileobj=_Seekable(sink), **plain)

    return [
        ("upload", write, upload),
        ("download", read, download),
    ]


class _Seekable:
    """Where downloads go: nowhere, and in any order."""

    def __init__(self, sink: Any) -> None:
        self.write = sink.write
        self.seek = sink.seek


def report(name: str, ours: Way, theirs: Way, rounds: int, size_bytes: int) -> float:
    """Print a row; the median ratio of rates by wall time."""
    times: dict[Way, list[tuple[float, float]]] = {ours: [], theirs: []}
    for turn in range(-1, rounds):
        for way in (ours, theirs) if turn % 2 else (theirs, ours):
            seconds = timed(way)
            if turn >= 0:  # the first is for connections and the server's volumes
                times[way].append(seconds)
    medians = []
    for clock, label in enumerate(("wall", "CPU")):
        ratios = [b[clock] / a[clock] for a, b in zip(times[ours], times[theirs], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{name:9} {label:4} ours / boto3 {median:.2f} ({low:.2f} to {high:.2f})", flush=True)
        medians.append(median)
    rates = [size_bytes / 1e6 / statistics.median(wall for wall, _ in times[way]) for way in (ours, theirs)]
    print(f"{name:9} MB/s ours {rates[0]:.0f}, boto3 {rates[1]:.0f}", flush=True)
    return medians[0]


def timed(way: Way) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
