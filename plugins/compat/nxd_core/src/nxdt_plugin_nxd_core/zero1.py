"""``NeuronZero1Optimizer``: ZeRO-1 without ``initialize_parallel_optimizer``, with its sharded save and load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nxdt_plugin_nxd_core.arguments import binds, refused
from nxdt_plugin_nxd_core.config import current_config
from nxdt_plugin_nxd_core.errors import NotOfThisModel
from nxdt_plugin_nxd_core.optimizer import NxDOptimizer, core_optimizer
from nxdt_plugin_nxd_core.tags import load_checkpoint, save_checkpoint

__all__ = ["NeuronZero1Optimizer"]

_TAG = "optim"


class NeuronZero1Optimizer(NxDOptimizer):
    """An optimizer whose state is sharded over data parallel ranks.

    Args:
        params: parameters of the model that ``initialize_parallel_model`` returned last, or groups of them.
        optimizer_class: a class of ``torch.optim``.
        grad_clipping, max_norm: decide instead of ``optimizer_config``.
        defaults: options of the class.

    Raises:
        ArgumentMeansNothing: the model was not laid out for ZeRO-1.
    """

    @binds
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        grad_clipping: bool = True,
        max_norm: float | None = None,
        **defaults: Any,
    ) -> None:
        config = current_config()
        if config is None or config.model is None:
            raise NotOfThisModel(call=type(self).__name__, problem="there are no parameters")
        if not config["optimizer_config"]["zero_one_enabled"]:
            argument, reason = "optimizer_config['zero_one_enabled']", "has left each rank with whole optimizer state"
            advice = "Pass optimizer_config={'zero_one_enabled': True} to neuronx_distributed_config."
            raise refused(type(self).__name__, argument, "False", reason, advice)
        core, trained = core_optimizer(config, optimizer_class, params, defaults)
        super().__init__(core, config, trained)
        norm = config.max_grad_norm if max_norm is None else max_norm
        self.max_norm = norm if grad_clipping else None

    @binds
    def save_sharded_state_dict(self, output_dir: str) -> None:
        """Save weights and state under the tag ``optim`` of ``output_dir``. Collective."""
        save_checkpoint(output_dir, _TAG, self.nxd_config.model, self)

    @binds
    def load_sharded_state_dict(self, output_dir: str) -> None:
        """Load what :meth:`save_sharded_state_dict` saved, in any layout. Collective."""
        load_checkpoint(output_dir, _TAG, self.nxd_config.model, self)
