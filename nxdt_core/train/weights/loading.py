"""The weights of a checkpoint into a model, each in any layout."""

from __future__ import annotations

import logging

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.protocols.parallel.piece import Piece
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.weights.frozen import base_digest, without_base

__all__ = ["load_weights"]

_log = logging.getLogger(__name__)


def load_weights(
    storage: CheckpointStore,
    manifest: Manifest,
    *,
    engine: ParallelEngine,
    model: ParallelModel,
    strict: bool = True,
    with_optimizer: bool = False,
) -> dict[str, torch.Tensor | Piece]:
    """Replace the weights of ``model`` by those of a checkpoint. Collective.

    Args:
        storage: where from.
        manifest: of the step to load.
        engine: of ``model``.
        model: in its layout.
        strict: refuse a checkpoint that lacks parameters of the model or has others; otherwise what it lacks stays as
            it is, what else it has is left out, and a warning names both.
        with_optimizer: whether optimizer state will be loaded, too. Without it, a checkpoint may lack what adapters
            added to the model.

    Returns:
        What was loaded, by name.

    Raises:
        AdapterOfAnotherBase: it leaves out what is frozen, and that is something else here.
        WeightsDoNotFit: names or shapes differ.
    """
    ranks, weights = engine.ranks, _expected(storage, manifest, engine, model, with_optimizer=with_optimizer)
    unmatched = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict
    )
    for names, fate in ((unmatched.missing, "keep their fresh values"), (unmatched.extra, "are left out")):
        if names and ranks.rank == 0:
            which = "that the checkpoint lacks" if names is unmatched.missing else "that the model lacks"
            _log.warning("%d parameters %s %s: %s", len(names), which, fate, listing(names))
    model.load_state_dict(weights, strict=False)  # whether names match was decided above
    return weights


def _expected(
    storage: CheckpointStore,
    manifest: Manifest,
    engine: ParallelEngine,
    model: ParallelModel,
    *,
    with_optimizer: bool,
) -> dict[str, torch.Tensor | Piece]:
    """The weights of ``model`` that the checkpoint fills: all; or those that train, where it has no others; or all but
    those that adapters added, where it has none of them."""
    weights = model.state_dict()
    if manifest.facts.without_base:
        if manifest.facts.base != base_digest(model, engine.ranks):
            raise AdapterOfAnotherBase(where=build.step_uri(storage, manifest.step), base="this run")
        return without_base(model, weights)
    if not with_optimizer and not model.added & manifest.tensors.get("model", {}).keys():
        return {name: weight for name, weight in weights.items() if name not in model.added}
    return weights
