"""A profiler trace of some steps, summarised: idle device, waits of the host, copies, kernels."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerator.bench import Bench

__all__ = ["TraceSummary", "report_trace", "summarise"]

_GAP_US = 50.0
_KERNELS = 12
"""That take the most time."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the runtime that the host waits in."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Times in microseconds."""

    span_us: float
    """From the first to the last event on the device."""
    busy_us: float
    """During which at least one kernel or copy ran."""
    gaps_us: list[float]
    """Idle times above 50 µs, the longest first."""
    waits: Mapping[str, tuple[int, float]]
    """Call that the host waits in → how often, total time."""
    copies: Mapping[str, tuple[int, float]]
    """Kind of copy → how often, total time."""
    kernels: list[tuple[str, int, float]]
    """Name, how often, total time; the longest first."""


def summarise(events: Iterable[Event]) -> TraceSummary:
    """Summarise the events of a Chrome trace that torch's profiler wrote."""
    timed = [event for event in events if event.get("ph") == "X"]
    device = sorted((event for event in timed if event.get("cat") in _ON_DEVICE), key=lambda event: event["ts"])
    busy: list[list[float]] = []
    for event in device:  # streams overlap: the device is idle where none of them works
        begin, end = event["ts"], event["ts"] + event["dur"]
        if busy and begin <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([begin, end])
    gaps = [second[0] - first[1] for first, second in pairwise(busy)]
    kernels = _totals(event for event in device if event["cat"] == "kernel")
    return TraceSummary(
        span_us=busy[-1][1] - busy[0][0] if busy else 0.0,
        busy_us=sum(end - begin for begin, end in busy),
        gaps_us=sorted((gap for gap in gaps if gap > _GAP_US), reverse=True),
        waits=_totals(event for event in timed if event["name"] in _WAITS),
        copies=_totals(event for event in device if event["cat"] != "kernel"),
        kernels=sorted(((name, *total) for name, total in kernels.items()), key=lambda row: -row[2]),
    )


def _totals(events: Iterable[Event]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        count, total = found[event["name"]]
        found[event["name"]] = count + 1, total + event["dur"]
    return dict(found)


def report_trace(bench: Bench, path: Path, *, steps: int) -> None:
    """Record what a compressed Chrome trace of ``steps`` steps shows."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = summarise(json.load(file)["traceEvents"])
    span = found.span_us or 1.0
    bench.row("device", times_per_step=None, ms_per_step=found.span_us / steps / 1e3, share=found.busy_us / span)
    gaps = found.gaps_us
    bench.row(
        f"gaps above {_GAP_US:.0f} µs",
        times_per_step=len(gaps) / steps,
        ms_per_step=sum(gaps) / steps / 1e3,
        share=sum(gaps) / span,
        longest_ms=gaps[0] / 1e3 if gaps else 0.0,
    )
    for kind, totals in (("host waits", found.waits), ("copies", found.copies)):
        for name, (count, total) in totals.items():
            bench.row(f"{kind}: {name}", times_per_step=count / steps, ms_per_step=total / steps / 1e3)
    for name, count, total in found.kernels[:_KERNELS]:
        bench.row(name[:80], times_per_step=count / steps, ms_per_step=total / steps / 1e3, share=total / span)
