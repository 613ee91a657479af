"""Core primitives: the step and what surrounds it, for a custom training loop. Needs no Lightning.

A whole training loop::

    config = nxdt_core.config.load("recipe.yaml")
    engine = build.engine(config); engine.start()
    model = initialize_parallel_model(config, engine)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    objective, schedule, state = build.objective(config), build.schedule(config), TrainState()
    dataset = build.dataloader(config, build.tokenizer(config)).split("train")
    for micro_batches in build.batches(config, engine, dataset):
        result = train_step(model, optimizer, micro_batches, objective, schedule, state, max_norm=1.0)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager, Manifest
from nxdt_core.checkpoint.format.manifest import Keep
from nxdt_core.checkpoint.formats.load import load_format_into
from nxdt_core.checkpoint.signing import refuse_foreign
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.protocols.lr_scheduler import LRSchedule
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.parallel.piece import Piece
from nxdt_core.training import build
from nxdt_core.training.hidden_state import watch_optimizer
from nxdt_core.training.run.versions import versions_of
from nxdt_core.training.state import TrainState, capture_rng, restore_rng
from nxdt_core.training.weights.average import WeightAverage, take_average
from nxdt_core.training.weights.frozen import base_digest, without_base
from nxdt_core.training.weights.saved_precision import round_to_bfloat16, take_masters

__all__ = [
    "SaveFacts",
    "StepResult",
    "begin_checkpoint",
    "evaluate",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "load_foreign",
    "save_checkpoint",
    "train_step",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step; tensors are device scalars, read only when something is logged."""

    loss: StepLoss
    grad_norm: torch.Tensor
    """Global 2-norm before clipping."""
    lr_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """What the loop says of a checkpoint beside its state."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures by which retention may rank it."""
    keep: Keep = "regular"
    """How retention treats it."""
    fencing: int = 0
    """Number of the ownership under which it is saved; 0 where nobody owns the store."""
    hf: Mapping[str, Any] = field(default_factory=dict)
    """What the Hugging Face directory that the weights came from says: ``read_hf_source(directory).facts()``, or
    ``manifest.facts.hf`` of the checkpoint that the loop began with."""


def initialize_parallel_model(
    config: ResolvedConfig, engine: ParallelEngine, *, materialise: bool = True
) -> ParallelModel:
    """Build the configured model in the engine's layout with fresh weights.

    Args:
        config: the run.
        engine: started.
        materialise: False where a checkpoint will be loaded: allocate, draw nothing.
    """
    return engine.initialize_model(
        build.model_builder(config),
        precision=build.precision(config),
        seed=config.run.seed,
        adapters=build.adapters(config),
        materialise=materialise,
    )


def initialize_parallel_optimizer(
    config: ResolvedConfig, engine: ParallelEngine, model: ParallelModel
) -> ParallelOptimizer:
    """Build the configured optimizer over ``model`` with the configuration's decay rules."""
    selected = config.selected("optimizer")
    optimizer = engine.initialize_optimizer(
        model,
        selected.component.load_target(),
        selected.config,
        decay_norms=config.run.model.do_layer_norm_weight_decay,
    )
    watch_optimizer(optimizer.inner, selected.component)
    return optimizer


def train_step(
    model: ParallelModel,
    optimizer: ParallelOptimizer,
    micro_batches: Sequence[Batch],
    objective: Objective,
    schedule: LRSchedule,
    state: TrainState,
    *,
    max_norm: float | None = None,
    apply: Callable[[], object] | None = None,
) -> StepResult:
    """Forward, backward, clipping, update: one optimizer step on one global batch; advances ``state``.

    A loss or gradient that is not finite never reaches the weights: ``optimizer.skipped_steps`` counts such steps.

    Args:
        model: in its layout.
        optimizer: over ``model``.
        micro_batches: this rank's part of the global batch.
        objective: the loss.
        schedule: factor on the learning rate by step.
        state: counters, changed in place.
        max_norm: clip the global gradient norm to this; None and 0 measure only.
        apply: called instead of ``optimizer.step``, by a loop that counts updates itself and ends in it.
    """
    factor = schedule(state.step)
    optimizer.begin_step(state.step)
    optimizer.set_lr_factor(factor)
    loss = model.run_train(micro_batches, objective)
    grad_norm = optimizer.clip_grad_norm(max_norm or None)
    optimizer.reject_unless_finite(loss.loss, grad_norm)
    (apply or optimizer.step)()
    state.step += 1
    state.updates += any(group["lr"] != 0 for group in optimizer.inner.param_groups)
    state.consumed_samples += model.data_ranks * sum(batch.samples for batch in micro_batches)
    state.consumed_tokens += model.data_ranks * sum(batch.input_ids.numel() for batch in micro_batches)
    return StepResult(loss=loss, grad_norm=grad_norm, lr_factor=factor)


def evaluate(model: ParallelModel, batches: Iterable[Sequence[Batch]], objective: Objective) -> float:
    """Mean loss per loss token over ``batches`` (each a rank's part of one global batch)."""
    total, weight = 0.0, 0.0
    for micro_batches in batches:
        step = model.run_eval(micro_batches, objective)
        total += float(step.loss) * float(step.weight)
        weight += float(step.weight)
    return total / weight if weight else float("nan")


def save_checkpoint(
    storage: CheckpointStorage,
    *,
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None,
    state: TrainState,
    extra: dict[str, Any] | None = None,
    about: SaveFacts = SaveFacts(),
    average: WeightAverage | None = None,
    before_commit: Callable[[], None] | None = None,
) -> Manifest:
    """Commit weights, optimizer state, counters and random-number generators under ``step-<state.step>``.

    Collective: every rank calls it and writes a share; it succeeds on all or fails on all. It returns once the
    checkpoint is committed; :func:`begin_checkpoint` returns before that.

    Args:
        storage: where to.
        config: kept in the manifest, so that the checkpoint says what it is. ``checkpoint.sign.key`` signs it.
        engine: of ``model``.
        model: in its layout.
        optimizer: None saves weights and counters only.
        state: counters and data position.
        extra: further JSON-able state of the caller's loop; tensors are allowed as leaves.
        about: metrics and fate of the checkpoint.
        average: of the weights, kept with the optimizer's state.
        before_commit: called on rank 0 directly before the commit; what it raises prevents that on all ranks.
    """
    parts = _parts(config, engine, model, optimizer, state, extra, about, average)
    signer = build.signer(config)
    return checkpoint.save_checkpoint(storage, **parts, ranks=engine.ranks, before_commit=before_commit, signer=signer)


def begin_checkpoint(
    manager: CheckpointManager,
    *,
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None,
    state: TrainState,
    extra: dict[str, Any] | None = None,
    about: SaveFacts = SaveFacts(),
    average: WeightAverage | None = None,
) -> bool:
    """As :func:`save_checkpoint`, returning as soon as the next step may change what is saved.

    Call ``manager.poll()`` after every step: it raises what a save met. ``manager.wait()`` ends the last save.

    Args:
        manager: made with ``engine.ranks``.
        config, engine, model, optimizer, state, extra, about, average: as of :func:`save_checkpoint`.

    Returns:
        False where the manager skips saves while one is in flight, and one is.
    """
    return manager.save(**_parts(config, engine, model, optimizer, state, extra, about, average))


class _Parts(TypedDict):
    """Keywords that every way of saving takes."""

    step: int
    model: dict[str, torch.Tensor | Piece]
    optimizer: dict[str, torch.Tensor | Piece]
    state: dict[str, Any]
    facts: CheckpointFacts


def _parts(
    config: ResolvedConfig,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None,
    state: TrainState,
    extra: dict[str, Any] | None,
    about: SaveFacts,
    average: WeightAverage | None,
) -> _Parts:
    skipped = 0 if optimizer is None else int(optimizer.skipped_steps)
    # The optimizer counts what it skipped since this process began, so what is saved has these taken off.
    updates = max(0, state.updates - skipped)
    weights, held = model.state_dict(), {} if optimizer is None else optimizer.state_dict()
    alone = not all(adapter.saves_base for adapter in build.adapters(config))
    if alone:
        weights = without_base(model, weights)
    if config.run.checkpoint.save_bf16:
        masters = round_to_bfloat16(weights, dict(model.named_parameters()))
        held |= {} if optimizer is None else masters
    if optimizer is not None and average is not None:
        held |= average.state_dict()
    return {
        "step": state.step,
        "model": weights,
        "optimizer": held,
        "state": {
            "train": {**state.to_dict(), "updates": updates},
            "rng": capture_rng(engine.device),
            "extra": extra or {},
        },
        "facts": CheckpointFacts(
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            updates=updates,
            config=config.to_dict(),
            plugin_fingerprint=config.kernel.fingerprint(),
            mesh=dict(engine.rank_info.mesh),
            metrics=dict(about.metrics),
            versions=versions_of(config.kernel),
            keep=about.keep,
            fencing=about.fencing,
            base=base_digest(model, engine.ranks) if model.added else "",
            without_base=alone,
            hf=about.hf,
        ),
    }


def load_checkpoint(
    storage: CheckpointStorage,
    manifest: Manifest,
    *,
    engine: ParallelEngine,
    model: ParallelModel,
    optimizer: ParallelOptimizer | None = None,
    state: TrainState | None = None,
    average: WeightAverage | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load what is given and return the ``extra`` of the save.

    Collective: every rank calls it and reads what it holds, whatever layout the checkpoint was saved in; it succeeds on
    all or fails on all. Random-number generators go on where they stopped if the layout is the same; in another one
    they belong to nobody and are left as they are.

    Args:
        storage: where from.
        manifest: of the step to load; see :func:`nxdt_core.checkpoint.latest`.
        engine: of ``model``.
        model: its weights are replaced.
        optimizer: None leaves optimizer state and random-number generators alone: weights only.
        state: its counters are replaced.
        average: is replaced with the optimizer's state; None leaves that of the checkpoint out.
        strict: refuse a checkpoint that lacks parameters of the model or has others; otherwise what it lacks stays as
            it is, what else it has is left out, and a warning names both.

    Raises:
        AdapterOfAnotherBase: it leaves out what is frozen, and that is something else here.
    """
    ranks, weights = engine.ranks, _awaited(storage, manifest, engine, model, base_alone=optimizer is None)
    unmatched = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict
    )
    for names, fate in ((unmatched.missing, "keep their fresh values"), (unmatched.extra, "are left out")):
        if names and ranks.rank == 0:
            which = "that the checkpoint lacks" if names is unmatched.missing else "that the model lacks"
            _log.warning("%d parameters %s %s: %s", len(names), which, fate, listing(names))
    model.load_state_dict(weights, strict=False)  # whether names match was decided above
    same_layout = dict(manifest.facts.mesh) == dict(engine.rank_info.mesh)
    same_layout &= checkpoint.saved_ranks(manifest) == ranks.world_size
    saved = checkpoint.load_state(storage, manifest, rank=ranks.rank if same_layout else 0, ranks=ranks)
    if optimizer is not None:
        found = checkpoint.load_optimizer_like(
            storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict
        )
        model.load_state_dict(take_masters(found), strict=False)
        averaged = take_average(found)
        if average is not None:
            average.load_state_dict(averaged)
        optimizer.load_state_dict(found)
        if same_layout:
            restore_rng(saved["rng"], engine.device)
    if state is not None:
        state.update(saved["train"])
    extra: dict[str, Any] = saved["extra"]
    return extra


def _awaited(
    storage: CheckpointStorage, manifest: Manifest, engine: ParallelEngine, model: ParallelModel, *, base_alone: bool
) -> dict[str, torch.Tensor | Piece]:
    """What of ``model`` a checkpoint shall fill: all; what trains, where that is all it has; with ``base_alone`` also
    all but what adapters added, where it has none of that."""
    weights = model.state_dict()
    if manifest.facts.without_base:
        if manifest.facts.base != base_digest(model, engine.ranks):
            raise AdapterOfAnotherBase(where=build.step_uri(storage, manifest.step), base="this run")
        return without_base(model, weights)
    if base_alone and not model.added & manifest.tensors.get("model", {}).keys():
        return {name: weight for name, weight in weights.items() if name not in model.added}
    return weights


def load_foreign(path: Path, *, config: ResolvedConfig, engine: ParallelEngine, model: ParallelModel) -> None:
    """Load the weights of another program's checkpoint, such as a Hugging Face directory.

    Collective: every rank calls it and reads the parameters that it holds a part of.

    Args:
        path: of an installed checkpoint format.
        config: of the run; its model is that of the weights.
        engine: of ``model``.
        model: its weights are replaced.

    Raises:
        CheckpointNotSigned: ``checkpoint.sign.trusted`` of ``config`` requires a signature.
    """
    refuse_foreign(build.trusted_keys(config), path)
    weights = {name: weight for name, weight in model.state_dict().items() if name not in model.added}
    load_format_into(path, build.model_builder(config), config.kernel, weights, ranks=engine.ranks)
    model.load_state_dict(weights, strict=False)
