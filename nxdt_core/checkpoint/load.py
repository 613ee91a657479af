"""Loading: every byte that is used was compared with its digest; nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from nxdt_core.checkpoint.faults import explained_os_errors
from nxdt_core.checkpoint.files import read_whole
from nxdt_core.checkpoint.layout import state_name
from nxdt_core.checkpoint.manifest import Manifest
from nxdt_core.checkpoint.shards import read_tensors
from nxdt_core.checkpoint.state_tree import decode_tree
from nxdt_core.errors import CheckpointDamaged
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["load_model", "load_optimizer", "load_state"]


def load_model(
    storage: CheckpointStorage, manifest: Manifest, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, on the CPU; only ``names`` where given, and then only their bytes are read.

    Tensors that were tied when saved are one object.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
        TensorNotInCheckpoint: one of ``names`` was not saved.
    """
    with explained_os_errors(f"{storage.uri}/{manifest.prefix}model"):
        return read_tensors(storage, manifest, "model", names)


def load_optimizer(
    storage: CheckpointStorage, manifest: Manifest, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """``<parameter name>/<state name>`` → tensor; otherwise as :func:`load_model`."""
    with explained_os_errors(f"{storage.uri}/{manifest.prefix}optim"):
        return read_tensors(storage, manifest, "optim", names)


def load_state(storage: CheckpointStorage, manifest: Manifest, *, rank: int = 0) -> dict[str, Any]:
    """The state tree that ``rank`` saved, equal in types and values.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
    """
    name = state_name(rank)
    where = f"{storage.uri}/{manifest.prefix}{name}"
    with explained_os_errors(where):
        data = read_whole(storage, manifest, name)
        own = [tensor for tensor in manifest.tensors.get("state", {}) if tensor.startswith(f"rank-{rank:05d}/")]
        tensors = read_tensors(storage, manifest, "state", own)
    try:
        state = decode_tree(json.loads(data), tensors)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(where=where, reason=f"it is no state ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointDamaged(where=where, reason="it is no state")
    return state
