"""Whether the model of a run can be built in its layout: tried without memory, where its plugin asks for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["check_layout"]


def check_layout(config: ResolvedConfig) -> None:
    """Build the model on the meta device, and send shapes through every shard of a run of several processes.

    It does nothing for a model whose plugin does not set ``tried_before_launch``: then it imports no torch.

    Raises:
        NxdtError: the model cannot be built, or not in this layout.
    """
    from nxdt_core.api import ModelComponent

    record = config.selected("model").component.record
    if not isinstance(record, ModelComponent) or not record.tried_before_launch:
        return
    from nxdt_core.errors.launch import EngineWithoutEstimate
    from nxdt_core.errors.models import ModelReadsValues
    from nxdt_core.training import build
    from nxdt_core.training.plan import plan

    build.model_builder(config).plan()
    if config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        return
    try:
        plan(config)
    except (EngineWithoutEstimate, ModelReadsValues):  # it cannot be tried like this, and may train well
        return
