"""Running out of memory ends in an error with what is in use and what was estimated, instead of a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import max_memory_bytes, profile_of
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.ranks import OutOfMemory
from nxdt_core.train.session import TrainSession

_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""Text in the message of the ``RuntimeError`` that torch raises where the host has no memory left."""
_ESTIMATE_S = 10.0
"""Longest wait of the other ranks for an estimate; it takes 4 CPU-seconds, most of them imports."""
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank, in the two parts that users can do something about in different ways."""

    held: int
    """Between steps: weights, gradients and optimizer state. Sharding helps."""
    step: int
    """During a step: activations, logits and buffers. Smaller micro-batches and recomputation help."""


@contextmanager
def memory_errors_explained(session: TrainSession) -> Iterator[None]:
    """Turn what allocators raise into an :class:`nxdt_core.errors.ranks.OutOfMemory` of this rank.

    Args:
        session: which the block builds or trains; the memory that its configuration takes is estimated again.

    Raises:
        OutOfMemory: the device, or the host, has no memory for what was asked.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _explained(session) from error
    except RuntimeError as error:
        if _HOST_ALLOCATOR not in str(error):
            raise
        raise _explained(session) from error


def _explained(session: TrainSession) -> NxdtError:
    engine = session.engine
    profile = profile_of(engine.device)
    peak, total = max_memory_bytes(engine.device), profile.operations.total_memory_bytes(engine.device)
    if peak is None or (total is None and not profile.host):
        usage, part = "the device does not say how much memory tensors had taken", ""
    elif total is None:
        usage, part = f"the process had taken up to {peak / _GIB:.1f} GiB", ""
    else:
        usage = f"tensors had taken up to {peak / _GIB:.1f} GiB of {total / _GIB:.1f} GiB"
        held = _held_bytes(session)
        sizes = engine.rank_info.mesh
        pp_rank = engine.rank_info.rank * sizes.get("pp", 1) // engine.rank_info.world_size
        part = compare(MemoryUse(held=held, step=max(0, peak - held)), _estimated(session.config, pp_rank))
    return OutOfMemory(
        rank=engine.ranks.rank, host=engine.ranks.host, device=str(engine.device), usage=usage, part=part
    )


def _held_bytes(session: TrainSession) -> int:
    """Weights, gradients and optimizer state that this process holds."""
    held: list[Any] = []
    if hasattr(session, "model"):
        for _, parameter in session.model.named_parameters():
            held += [parameter, parameter.grad]
    if hasattr(session, "optimizer"):
        held += [value for state in session.optimizer.inner.state.values() for value in state.values()]
    local = [local_of(tensor) for tensor in held]
    return sum(tensor.nbytes for tensor in local if isinstance(tensor, torch.Tensor))


def _estimated(config: ResolvedConfig, pp_rank: int) -> MemoryUse | None:
    """Return what ``nxdt plan`` expects of this rank; None if it fails or takes too long.

    (It runs in a separate process: the estimate simulates a process group, and this process may be in a real one.)
    """
    command = [sys.executable, "-m", "nxdt_core", "plan", "--json", "--", config.source, *config.overrides]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ESTIMATE_S, check=False)
        ranks = json.loads(done.stdout)["ranks"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
    memory = next(rank["memory_bytes"] for rank in ranks if rank["pp_rank"] == pp_rank)
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    return MemoryUse(held=held, step=memory["total"] - held)


def compare(found: MemoryUse, estimated: MemoryUse | None) -> str:
    """Return a sentence on what was taken for what, and which part is more than was expected; empty without an
    estimate."""
    if estimated is None:
        return ""
    parts = (
        ("weights, gradients and optimizer state", found.held, estimated.held),
        ("activations and buffers", found.step, estimated.step),
    )
    taken = " and ".join(f"{have / _GIB:.1f} GiB {name} (estimated: {want / _GIB:.1f})" for name, have, want in parts)
    name, have, want = max(parts, key=lambda part: part[1] - part[2])
    excess = (
        f"{name} exceeded the estimate" if have > want else "neither exceeded its estimate, the device is too small"
    )
    return f" Of that, {taken}: {excess}."
