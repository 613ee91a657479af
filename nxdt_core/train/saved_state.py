"""Content of a checkpoint of a run: the parts of a save, and how they are loaded into a run again.

With ``checkpoint.save_bf16``, weights are in bfloat16. Where a run updates wider weights (masters, or float32 weights
themselves), the section ``model`` gets them rounded to the nearest, for those who only want a model. The section
``optim`` gets them as they are, under ``<parameter name>/master_weight``, so that a resume is exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.section import keys_of
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.piece import Piece
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.state import TrainState, capture_rng, versions_of
from nxdt_core.train.weights.average import WeightAverage, pop_average
from nxdt_core.train.weights.loading import base_digest, load_weights, without_base
from nxdt_core.train.weights.saved_config import check_shared_state, continues_optimizer

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointFacts, Manifest
    from nxdt_core.checkpoint.format.manifest import Keep

Tensors = dict[str, torch.Tensor | Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """Facts of a checkpoint that a loop adds to its state."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by which retention may rank it."""
    keep: Keep = "regular"
    """Treatment of the checkpoint by retention."""
    fencing: int = 0
    """Number of the ownership under which it is saved; 0 where the store has no owner."""


class SaveParts(TypedDict):
    """Keywords that every way of saving takes."""

    step: int
    model: dict[str, torch.Tensor | Piece]
    optimizer: dict[str, torch.Tensor | Piece]
    state: dict[str, Any]
    facts: CheckpointFacts
    ties: dict[str, str]


def save_parts(
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None,
    average: WeightAverage | None,
    state: TrainState,
    *,
    extra: dict[str, Any],
    about: SaveFacts,
    saved_config: Mapping[str, Any],
    elements: int | None,
    hf: Mapping[str, Any],
) -> SaveParts:
    """Return what a save takes of a run. Collective at the first call, and where the model has an adapter.

    Args:
        config: the resolved configuration of the run.
        engine: the parallel engine that has laid out ``model``.
        model: the parallel model of the run.
        optimizer: over ``model``; None saves weights and counters.
        average: exponential moving average of the weights; None without one.
        state: counters of the run.
        extra: JSON-able state of the caller's loop.
        about: metrics of the checkpoint, and how retention treats it.
        saved_config: the configuration as a checkpoint records it.
        elements: number of weights that all ranks together save; None at the first call, which counts them.
        hf: facts of the Hugging Face directory that the weights came from.
    """
    weights, held = model.state_dict(), {} if optimizer is None else optimizer.state_dict()
    if optimizer is not None and elements is None:
        check_shared_state(held, weights, engine.ranks)
    coded = config.run.adapter.base_dtype is not None
    alone = coded or not all(adapter.saves_base for adapter in build.adapters(config))
    if alone:
        weights = without_base(model, weights)
    if config.run.checkpoint.save_bf16:
        weights, masters = round_to_bfloat16(weights, dict(model.named_parameters()))
        held |= {} if optimizer is None else masters
    if optimizer is not None and average is not None:
        held |= average.state_dict()
    if elements is None:  # of all ranks together
        sizes = {name: math.prod(weight.shape) for name, weight in weights.items()}
        by_name = {name: size for part in engine.ranks.all_gather_object(sizes) for name, size in part.items()}
        elements = sum(by_name.values())
    # The optimizer counts what it skipped since this process began, so what is saved has these taken off.
    updates = max(0, state.updates - (0 if optimizer is None else int(optimizer.skipped_steps)))
    facts = checkpoint.CheckpointFacts(
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        updates=updates,
        config=saved_config,
        plugin_fingerprint=config.kernel.fingerprint(),
        plugins=config.kernel.identities(),
        mesh=dict(engine.rank_info.mesh),
        metrics=dict(about.metrics),
        versions=versions_of(config.kernel),
        keep=about.keep,
        fencing=about.fencing,
        elements=elements,
        base=base_digest(model, engine.ranks) if model.added else "",
        without_base=alone,
        hf=hf,
    )
    own = {"train": {**state.to_dict(), "updates": updates}, "rng": capture_rng(engine.device), "extra": extra}
    return SaveParts(step=state.step, model=weights, optimizer=held, state=own, facts=facts, ties={})


def load_saved(
    storage: CheckpointStore,
    manifest: Manifest,
    *,
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None,
    average: WeightAverage | None,
    strict: bool,
) -> tuple[dict[str, Any], bool]:
    """Load the tensors of a checkpoint into a run. Collective.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint to load.
        config: the resolved configuration of the run.
        engine: the parallel engine that has laid out ``model``.
        model: gets the weights.
        optimizer: gets its state, unless it cannot continue with it; None leaves it and the average as they are.
        average: exponential moving average of the weights; None without one.
        strict: whether names of parameters must be the same in both.

    Returns:
        The state without tensors of this rank, and whether the checkpoint was saved in the layout of this run. If not,
        the state is that of rank 0.
    """
    ranks = engine.ranks
    continues = optimizer is None or continues_optimizer(config, manifest, build.step_uri(storage, manifest.step))
    grows = optimizer is None and build.added_tokens(config)
    with mismatch_explained(config, manifest):
        weights = load_weights(
            storage,
            manifest,
            engine=engine,
            model=model,
            strict=strict,
            with_optimizer=optimizer is not None,
            table_rows=build.model_builder(config).vocab_size if grows else None,
        )
        same_layout = dict(manifest.facts.mesh) == dict(engine.rank_info.mesh)
        same_layout &= checkpoint.saved_ranks(manifest) == ranks.world_size
        saved = checkpoint.load_state(storage, manifest, rank=ranks.rank if same_layout else 0, ranks=ranks)
        if optimizer is not None:
            found = checkpoint.load_optimizer_like(
                storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict
            )
            suffix = f"/{MASTER_WEIGHT}"  # the wider weights of :func:`round_to_bfloat16`
            masters = {key.removesuffix(suffix): found.pop(key) for key in list(found) if key.endswith(suffix)}
            model.load_state_dict(masters, strict=False)
            averaged = pop_average(found)
            if average is not None:
                average.load_state_dict(averaged)
            if continues:
                optimizer.load_state_dict(found)
    return saved, same_layout


def round_to_bfloat16(weights: Tensors, parameters: Collection[str]) -> tuple[Tensors, Tensors]:
    """Round those of ``weights`` that are ``parameters`` and wider than bfloat16.

    The rounded ones are 2 bytes per element of new memory on the device, until they are saved.

    Returns:
        The weights, and those that were rounded, as they were, under the names of optimizer state.
    """
    rounded, masters = dict(weights), Tensors()
    for name, weight in weights.items():
        dtype = (weight.tensor if isinstance(weight, Piece) else weight).dtype
        if name in parameters and dtype.is_floating_point and dtype.itemsize > torch.bfloat16.itemsize:
            masters[f"{name}/{MASTER_WEIGHT}"] = weight
            rounded[name] = (
                replace(weight, tensor=weight.tensor.bfloat16()) if isinstance(weight, Piece) else weight.bfloat16()
            )
    return rounded, masters


@contextmanager
def mismatch_explained(config: ResolvedConfig, manifest: Manifest) -> Iterator[None]:
    """Name in a ``WeightsDoNotFit`` the keys of the model that differ between ``manifest`` and
    ``config``."""
    try:
        yield
    except WeightsDoNotFit as error:
        before = manifest.facts.config.get("model", {})
        if not isinstance(before, Mapping):
            before = {}
        shown, values = config.to_dict()["model"], config.to_values()["model"]
        cls: Any = type(config.selected("model").config)
        saved = [
            f"model.{key}={before[key]}"
            for key in ("name", *keys_of(cls))
            if key in before and before[key] not in (shown.get(key), values.get(key))
        ]
        raise WeightsDoNotFit(missing=error.missing, extra=error.extra, shapes=error.shapes, saved=saved) from error
