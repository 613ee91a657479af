"""What becomes of running out of memory: an error with the figures, instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nxdt_core.devices import max_memory_bytes, profile_of
from nxdt_core.errors import OutOfMemory
from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["memory_errors_explained"]

_HOST_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of the ``RuntimeError`` that torch raises where the host has no memory left."""


@contextmanager
def memory_errors_explained(device: torch.device, ranks: RankAgreement) -> Iterator[None]:
    """Turn what allocators raise into an :class:`nxdt_core.errors.OutOfMemory` of this rank.

    Raises:
        OutOfMemory: the device, or the host, has no memory for what was asked.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _explained(device, ranks) from error
    except RuntimeError as error:
        if _HOST_ALLOCATOR not in str(error):
            raise
        raise _explained(device, ranks) from error


def _explained(device: torch.device, ranks: RankAgreement) -> OutOfMemory:
    return OutOfMemory(rank=ranks.rank, host=ranks.host, device=str(device), usage=_usage(device))


def _usage(device: torch.device) -> str:
    peak = max_memory_bytes(device) / 2**30
    if profile_of(device).host:
        return f"the process had taken up to {peak:.1f} GiB"
    total = torch.get_device_module(device).get_device_properties(device).total_memory / 2**30
    return f"tensors had taken up to {peak:.1f} GiB of {total:.1f} GiB"
