"""The optimizer step, and the model and the optimizer that it works on.

:class:`nxdt_core.train.session.TrainSession` is made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.kernel.plugin import BUILTIN
from nxdt_core.launch.agreement import check_agreement
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.schedule import LRSchedule
from nxdt_core.train import build
from nxdt_core.train.hidden_state import watch_optimizer
from nxdt_core.train.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step; tensors are device scalars, read only when something is logged."""

    loss: StepLoss
    grad_norm: torch.Tensor
    """Global 2-norm before clipping."""
    lr_factor: float


def start_engine(config: ResolvedConfig, engine: ParallelEngine) -> None:
    """Start ``engine`` and compare what all ranks are about to run. Collective.

    Raises:
        RanksDisagree: versions, plugins or configurations differ between ranks.
    """
    engine.start()
    if engine.ranks.world_size > 1:
        check_agreement(config, engine.ranks)


def initialize_parallel_model(
    config: ResolvedConfig, engine: ParallelEngine, *, materialise: bool = True
) -> ParallelModel:
    """Build the configured model in the engine's layout with fresh weights.

    Args:
        config: the run.
        engine: started.
        materialise: False where a checkpoint will be loaded: allocate, draw nothing.
    """
    with build.plan_errors_named(config):
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
    if selected.component.plugin != BUILTIN:
        watch_optimizer(optimizer.inner, selected.component)
    return optimizer


@torch.enable_grad()  # code of a plugin, such as a callback or a reward, may have switched it off
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
        model: the parallel model, in its layout.
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


def mean_loss(results: Iterable[StepLoss]) -> float:
    """Mean loss per unit of weight (mostly per loss token) over the results of several global batches."""
    total, weight = 0.0, 0.0
    for result in results:
        total += float(result.loss) * float(result.weight)
        weight += float(result.weight)
    return total / weight if weight else float("nan")


def without_gradients(*, inference: bool) -> AbstractContextManager[None]:
    """Return the mode of a validation: that of inference where it is asked for, but not over the host's process groups,
    whose collectives take no tensor that was made in it."""
    hosts = profile_of(HOST).process_group_backend
    over_hosts = dist.is_available() and dist.is_initialized() and dist.get_backend() == hosts
    return torch.inference_mode() if inference and not over_hosts else torch.no_grad()
