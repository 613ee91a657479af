"""Collectives of this process in torch's flight recorder: how many began and ended, and which was the last.

Backends keep a ring of their newest collectives. Gloo's and NCCL's rings are read here; the figures are zero for a
backend or a version of torch without one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

__all__ = ["Collectives", "keep_record", "read_collectives"]

_READERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_KEPT = "256"
"""Collectives that the ring holds unless ``TORCH_FR_BUFFER_SIZE`` says otherwise: a few layers of a step. One read of
them takes 6 ms; of torch's default of 2,000 it takes 80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Collectives of all process groups of this process."""

    begun: int
    done: int
    waiting: bool
    """Whether one that has begun is not done: the process, or its device, waits for other ranks."""
    newest: tuple[str, ...]
    """Oldest first, each as ``all_reduce 12 of group default_pg, [4, 8] float``: its name, its number within its
    process group, and shapes and types of its inputs."""


def keep_record() -> None:
    """Let the process groups that are made from now on keep their newest collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT)


def read_collectives(newest: int) -> Collectives:
    """Return how many collectives have begun and are done, and at most ``newest`` of the last ones."""
    records = [json.loads(read(True, False)) for name in _READERS if (read := getattr(c10d, name, None))]
    groups = [status for record in records for status in record.get("pg_status", {}).values()]
    counts = [
        (_count(status, "last_enqueued_collective"), _count(status, "last_completed_collective")) for status in groups
    ]
    entries = [entry for record in records for entry in record.get("entries", ())]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return Collectives(
        begun=sum(begun for begun, _ in counts),
        done=sum(done for _, done in counts),
        waiting=any(begun > done for begun, done in counts),
        newest=tuple(_described(entry) for entry in entries[-newest:]),
    )


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
