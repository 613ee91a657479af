"""Whether a run's model can be built in its layout, and its objective computed there: tried without memory, where their
plugins ask for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["check_layout"]


def check_layout(config: ResolvedConfig) -> None:
    """Build the model on the meta device, and send shapes through every shard and the objective.

    It does nothing, and imports no torch, for a model whose record sets ``tried_before_launch`` to False, or leaves it
    out where the run does not shard the model. An objective of a plugin is tried where logits are not whole: it may
    compute with them in another way than the functions of :mod:`nxdt_core.models.loss`.

    Raises:
        NxdtError: the model cannot be built, or not in this layout, or the objective does not take its logits.
    """
    from nxdt_core.api import ModelComponent
    from nxdt_core.kernel.plugin import BUILTIN

    record, run = config.selected("model").component.record, config.run
    world_size = run.trainer.devices * run.trainer.num_nodes
    sizes = run.distributed_strategy.mesh_sizes(world_size)
    wanted = record.tried_before_launch if isinstance(record, ModelComponent) else False
    if wanted is None:
        wanted = max(sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1
    whole = sizes.tp == 1 and run.model.loss_chunk_tokens is None
    tries_objective = not whole and config.selected("objective").component.plugin != BUILTIN
    if not (wanted or tries_objective):
        return
    from nxdt_core.errors.launch import EngineWithoutEstimate
    from nxdt_core.errors.models import ModelReadsValues
    from nxdt_core.train import build
    from nxdt_core.train.plan import plan

    build.model_builder(config).plan()
    if world_size == 1 and not tries_objective:
        return
    try:
        plan(config)
    except (EngineWithoutEstimate, ModelReadsValues):  # it cannot be tried like this, and may train well
        return
