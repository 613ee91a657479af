"""A profiler trace of some steps, as rows: idle device, waits of the host, copies, kernels."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerator.bench import Bench

__all__ = ["report_trace", "trace_rows"]

_GAP_US = 50.0
_KERNELS = 12
"""That take the most time."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the runtime that the host waits in."""

Event = Mapping[str, Any]


def report_trace(bench: Bench, path: Path, *, steps: int) -> None:
    """Record what a compressed Chrome trace of ``steps`` steps, which torch's profiler wrote, shows."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in trace_rows(json.load(file)["traceEvents"], steps=steps):
            bench.row(**row)


def trace_rows(events: Iterable[Event], *, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row of the device with the share of time in which it was busy, one of its idle times, and one for each
    call, copy and kernel, the longest first. Shares are of the time from the first to the last event on the device."""
    timed = [event for event in events if event.get("ph") == "X"]
    device = sorted((event for event in timed if event.get("cat") in _ON_DEVICE), key=lambda event: event["ts"])
    busy: list[list[float]] = []
    for event in device:  # streams overlap: the device is idle where none of them works
        begin, end = event["ts"], event["ts"] + event["dur"]
        if busy and begin <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([begin, end])
    span = busy[-1][1] - busy[0][0] if busy else 0.0

    def row(what: str, count: int | None, total: float, share_of: float, **more: float) -> dict[str, Any]:
        times = None if count is None else count / steps
        share = share_of / span if span else 0.0
        return {"what": what, "times_per_step": times, "ms_per_step": total / steps / 1e3, "share": share, **more}

    gaps = [gap for gap in (second[0] - first[1] for first, second in pairwise(busy)) if gap > _GAP_US]
    yield row("device", None, span, sum(end - begin for begin, end in busy))
    yield row(f"gaps above {_GAP_US:.0f} µs", len(gaps), sum(gaps), sum(gaps), longest_ms=max(gaps, default=0.0) / 1e3)
    for kind, found in (
        ("host waits: ", [event for event in timed if event["name"] in _WAITS]),
        ("copies: ", [event for event in device if event["cat"] != "kernel"]),
        ("", [event for event in device if event["cat"] == "kernel"]),
    ):
        totals: dict[str, list[float]] = defaultdict(list)
        for event in found:
            totals[event["name"]].append(event["dur"])
        for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:_KERNELS]:
            yield row(f"{kind}{name}"[:80], len(times), sum(times), sum(times))
