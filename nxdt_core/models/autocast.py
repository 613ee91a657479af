"""The dtype that matrix products run in: what autocast makes of the dtype of their inputs.

Compiled layers use these functions. They ask what torch 2.9 to 2.15 all trace, unlike
``torch.amp.is_autocast_available``, which breaks graphs up to 2.11. Of the devices that nxdt uses, only ``meta``
has no autocast. There, the host's autocast says in which dtype a run that is planned would compute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from nxdt_core.distributed.devices import HOST


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of ``tensor`` runs. Autocast leaves float64 as it is."""
    if tensor.dtype == torch.float64:
        return tensor.dtype
    kind = HOST.type if tensor.is_meta else tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the block in which products on the device of ``tensor`` run in the dtype of their inputs."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
