"""Optimizer state in checkpoints: whether one can hold it, and whether a run's optimizer can continue with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.checkpoint.format.manifest import digest
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import sharded_over
from nxdt_core.engine.optim.state import stepped_once, unpacked_state
from nxdt_core.errors.optimizers import OptimizerStateOfShards
from nxdt_core.errors.training import OptimizerChanged
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.train.weights.average import AVERAGE
from nxdt_core.train.weights.saved_config import saved_optimizer

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest

__all__ = ["check_shared_state", "continues_optimizer"]

_NOT_OF_THE_FORM = {"lr", "weight_decay", "param_groups", "sched"}
"""Keys of ``model.optim`` that decide no state."""
_KINDS = (((16, 16), True), ((2, 16, 16), True), ((16, 16), False), ((16,), False))
"""Shapes of parameters that optimizers may treat differently, and whether each is a matrix of a hidden layer."""


def continues_optimizer(config: ResolvedConfig, manifest: Manifest, where: str) -> bool:
    """Return whether the optimizer of ``config`` continues with the state in ``manifest``, the checkpoint ``where``.

    It does where its section of the configuration is that of the checkpoint. Else names of state decide: another
    optimizer must keep exactly those that the checkpoint has, as ``adamw`` and ``adamw_8bit`` do.

    Raises:
        OptimizerChanged: it cannot, and ``checkpoint.optimizer_on_change`` is ``error``.
    """
    saved, now = saved_optimizer(manifest), config.to_values()["model"]["optim"]
    changed = [key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key)]
    if not set(changed) - _NOT_OF_THE_FORM:
        return True
    held = _saved_names(manifest)
    known, renamed = _names_kept(config), saved.get("name", now["name"]) != now["name"]
    if (held == known) if renamed else (held <= known):
        return True
    if config.run.checkpoint.optimizer_on_change == "reset":
        return False
    raise OptimizerChanged(
        where=where,
        saved=_described(saved.get("name"), held),
        found=_described(now["name"], known),
    )


def check_shared_state(
    state: Mapping[str, torch.Tensor | Piece], weights: Mapping[str, torch.Tensor | Piece], ranks: RankAgreement
) -> None:
    """Check that state without its parameter's shape is equal on all ranks that have a shard of the parameter.

    Collective. A checkpoint holds such state once.

    Args:
        state: of the optimizer, as its ``state_dict`` returns it.
        weights: of this rank by name; DTensors or pieces where they are sharded.
        ranks: for collectives over all processes of the run.

    Raises:
        OptimizerStateOfShards: some differs; the same on all ranks.
    """
    own = {
        key: (
            str(value.dtype),
            tuple(value.shape),
            digest(value.detach().to(HOST).reshape(-1).view(torch.uint8).numpy().tobytes()),
        )
        for key, value in state.items()
        if type(value) is torch.Tensor and _is_shard(weights.get(key.rpartition("/")[0]))
    }
    found: dict[str, set[object]] = {}
    for each in ranks.all_gather_object(own):
        for key, value in each.items():
            found.setdefault(key, set()).add(value)
    differ = sorted(key for key, values in found.items() if len(values) > 1)
    if differ:
        raise OptimizerStateOfShards(state=differ, problem="differs between ranks that have shards of one parameter")


def _is_shard(weight: torch.Tensor | Piece | None) -> bool:
    if isinstance(weight, Piece):
        return weight.box.shape != weight.shape
    return weight is not None and bool(sharded_over(weight))


def _saved_names(manifest: Manifest) -> set[frozenset[str]]:
    """Return the sets of state names that parameters have in a checkpoint."""
    by_parameter: dict[str, set[str]] = {}
    for key in manifest.tensors.get("optim", {}):
        parameter, _, leaf = key.rpartition("/")
        if leaf not in (AVERAGE, MASTER_WEIGHT):
            by_parameter.setdefault(parameter, set()).add(leaf.partition("#")[0])
    return set(map(frozenset, by_parameter.values()))


def _names_kept(config: ResolvedConfig) -> set[frozenset[str]]:
    """Return the sets of state names that the run's optimizer has after a step, of parameters of every kind."""
    selected = config.selected("optimizer")
    parameters = [nn.Parameter(torch.ones(shape)) for shape, _ in _KINDS]
    shards = [ParameterShard(shape=shape, box=Box.whole(shape), matrix=matrix) for shape, matrix in _KINDS]
    optimizer = stepped_once(selected.component.load_target(), selected.config, parameters, shards)
    states = [unpacked_state(optimizer, parameter) for parameter in parameters]
    return {frozenset(str(name) for name, value in state.items() if value is not None) for state in states}


def _described(name: str | None, states: Iterable[frozenset[str]]) -> str:
    names = sorted({leaf for state in states for leaf in state})
    return f"{name or 'another optimizer'} ({', '.join(names) or 'no state'})"
