"""Saving one checkpoint: data files first, each with its digests, the manifest last.

Until the manifest exists nothing is visible; once it exists everything under it is complete and durable. A save
that fails leaves what was committed before and takes its own files away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from nxdt_core.checkpoint.commit import clear_other_attempts, commit, prepare_step, withdraw
from nxdt_core.checkpoint.faults import explained, explained_os_errors
from nxdt_core.checkpoint.files import AttemptWriter
from nxdt_core.checkpoint.layout import attempt_prefix, new_attempt, state_name, step_name, step_prefix
from nxdt_core.checkpoint.manifest import CheckpointFacts, Manifest, encode_facts
from nxdt_core.checkpoint.shards import check_tensor, write_tensors
from nxdt_core.checkpoint.state_tree import encode_tree
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["save_checkpoint"]

_RANK = 0


def save_checkpoint(
    storage: CheckpointStorage,
    *,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    facts: CheckpointFacts,
) -> Manifest:
    """Save everything under ``step`` and commit it. A step that is committed already is replaced.

    Args:
        storage: where to.
        step: the number of optimizer steps done.
        model: parameters and buffers by their global names.
        optimizer: ``<parameter name>/<state name>`` → tensor.
        state: JSON-able tree with tensors as leaves: positions, random states, schedules.
        facts: what goes into the manifest beside.

    Raises:
        UnsavableState: a value is neither JSON-able nor a plain tensor; nothing was written.
        StorageFull, StorageDenied, StorageError: the store failed; committed checkpoints are as they were, and what
            this save wrote is deleted as far as the store lets it.
        CheckpointConflict: another process committed the same step meanwhile.
    """
    state_tensors: dict[str, torch.Tensor] = {}
    state_json = _encode_state(state, state_tensors)
    sections = {"model": model, "optim": optimizer, "state": state_tensors}
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            check_tensor(f"{section}/{name}", tensor)
    encode_facts(facts)
    attempt, where = new_attempt(), f"{storage.uri}/{step_name(step)}"
    with explained_os_errors(where):
        replaces = prepare_step(storage, step)
    try:
        writer = AttemptWriter(storage, attempt_prefix(step, attempt))
        index = {section: write_tensors(writer, section, tensors, rank=_RANK) for section, tensors in sections.items()}
        with writer.file(state_name(_RANK)) as stream:
            stream.write(state_json)
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            facts=facts,
            files=writer.entries,
            tensors=index,
        )
        commit(storage, manifest, replaces)
    except BaseException as error:
        withdraw(storage, step, attempt)
        if isinstance(error, OSError):
            raise explained(error, where) from error
        raise
    clear_other_attempts(storage, manifest)
    with explained_os_errors(where):
        storage.after_commit(step_prefix(step))
    return manifest


def _encode_state(state: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """The JSON of ``state``; its tensors are put into ``tensors`` under names that begin with the rank."""

    def put_tensor(at: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = f"rank-{_RANK:05d}{at}"
        tensors[name] = value
        return name

    return json.dumps(encode_tree(state, put_tensor=put_tensor), separators=(",", ":"), allow_nan=False).encode()
