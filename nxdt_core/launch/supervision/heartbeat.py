"""A rank's heartbeat, which proves its progress to the supervisor, and the files that show where a run hung.

Stacks are written by :mod:`faulthandler`, which needs no cooperation of the threads that hang.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from nxdt_core.launch.supervision.messages import Beat
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.system.progress import PROGRESS, process_stat
from nxdt_core.system.regular_files import make_directory, regular_opener

_READERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_KEPT = "256"
"""Collectives that the ring holds unless ``TORCH_FR_BUFFER_SIZE`` says otherwise: a few layers of a step. One read of
them takes 6 ms; of torch's default of 2,000 it takes 80."""
STACKS_DIR = "stacks"
"""Subdirectory of a run's directory for the stacks of its ranks when it hung."""
_COLLECTIVES = 16
"""Number of the newest collectives that a file of stacks lists."""


def enable_flight_recorder() -> None:
    """Let the process groups that are made from now on keep their newest collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT)


def heartbeat(place: RankEnvironment, limit_s: float) -> Beat:
    """Return the heartbeat of this rank, which allows ``limit_s`` seconds without progress."""
    counts, newest = _read_collectives(1)
    return Beat(
        rank=place.rank,
        host=place.host,
        pid=os.getpid(),
        limit_s=limit_s,
        step=PROGRESS.step,
        phase=PROGRESS.phase,
        count=PROGRESS.count,
        begun=sum(begun for begun, _ in counts),
        done=sum(done for _, done in counts),
        waiting=any(begun > done for begun, done in counts),
        last="".join(newest),
        cpu_s=time.process_time() + _cpu_of_children_s(os.getpid()),
    )


def write_stacks(run_dir: Path, place: RankEnvironment) -> str:
    """Write the Python stacks of all threads and the newest collectives to a file of this rank.

    Returns:
        Its directory; empty where nothing could be written.
    """
    directory = run_dir / STACKS_DIR
    try:
        path = make_directory(directory) / f"rank-{place.rank:05d}.txt"
        with open(path, "w", encoding="utf-8", opener=regular_opener) as stream:
            stream.write(f"Rank {place.rank} on {place.host}, process {os.getpid()}, ")
            stream.write(f"step {PROGRESS.step}, {PROGRESS.phase}\n\nNewest collectives:\n")
            stream.write("\n".join(_read_collectives(_COLLECTIVES)[1] or ["none recorded"]) + "\n\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)
    except OSError:
        return ""
    return str(directory)


def _read_collectives(newest: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Return how many collectives each process group of this process has begun and done, and the ``newest`` last ones.

    These are oldest first, each as ``all_reduce 12 of group default_pg, [4, 8] float``: its name, its number within its
    process group, and shapes and types of its inputs.
    """
    records = [json.loads(read(True, False)) for name in _READERS if (read := getattr(c10d, name, None))]
    counts = [
        (_count(status, "last_enqueued_collective"), _count(status, "last_completed_collective"))
        for record in records
        for status in record.get("pg_status", {}).values()
    ]
    entries = [entry for record in records for entry in record.get("entries", ())]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return counts, [_described(entry) for entry in entries[-newest:]]


def _count(status: Mapping[str, Any], name: str) -> int:
    """A counter of one process group; -1 stands for none."""
    return max(0, int(status.get(name, 0)))


def _described(entry: Mapping[str, Any]) -> str:
    operation = str(entry.get("profiling_name", "")).partition(":")[2] or "collective"
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    group = entry.get("process_group", ("", ""))
    label = group[1] if len(group) > 1 and group[1] not in ("", "undefined") else group[0]
    shapes, types = entry.get("input_sizes", ()), entry.get("input_dtypes", ())
    inputs = ", ".join(f"{list(shape)} {kind}" for shape, kind in zip(shapes, types, strict=False))
    return f"{operation} {number} of group {label}" + (f", {inputs.lower()}" if inputs else "")


def continue_stopped(processes: Iterable[int]) -> None:
    """Continue those of this host's processes that are stopped, so that they can write their stacks and end."""
    for pid in processes:
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped by a signal. False where the system does not show it."""
    fields = process_stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def _cpu_of_children_s(pid: int) -> float:
    """CPU time of a process's descendants, such as compilers; 0 where the system does not show it."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return 0.0
    seconds = 0.0
    for child in children:
        fields = process_stat(child)
        if fields:
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + _cpu_of_children_s(child)
    return seconds
