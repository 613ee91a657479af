"""``LoraConfig`` and ``LoRAModel`` of NxD Core, over the plugin ``lora``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nxdt_core.kernel import Kernel
from nxdt_core.models.random.init import initialize
from nxdt_plugin_nxd_core.arguments import binds, refused
from nxdt_plugin_nxd_core.config import NxDConfig
from nxdt_plugin_nxd_core.layers import plan_of

_SEED = 1234


@dataclass(kw_only=True)
class LoraConfig:
    """Options of low-rank updates under NxD Core's names, with its defaults.

    Pass it to ``neuronx_distributed_config(lora_config=...)``. The fields are the keys of
    ``nxdt-plugin-lora``, which has to be installed.
    """

    enable_lora: bool = False
    lora_rank: int = 16
    lora_alpha: float = 8.0
    lora_dropout: float = 0.0
    bias: str = "none"
    target_modules: Sequence[str] | str | None = None
    """Parts of the paths of layers; None means every linear layer but the head."""
    use_rslora: bool = False
    init_lora_weights: str = "default"
    modules_to_save: Sequence[str] | None = None
    lora_verbose: bool = False
    save_lora_base: bool = False
    load_lora_from_ckpt: bool = False
    lora_save_dir: str | None = None
    lora_load_tag: str | None = None

    def section(self) -> dict[str, Any]:
        """Return the section ``adapter`` that means the same."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        for name in values.keys() & {"target_modules", "modules_to_save"}:
            values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        return {"name": "lora", **values}


LoraConfig.__init__ = binds(LoraConfig.__init__)  # type: ignore[method-assign]


class LoRAModel(nn.Module):
    """A module of one process with updates of its layers; what it trains are these.

    Under tensor or pipeline parallelism, pass the configuration to ``neuronx_distributed_config(lora_config=...)``
    instead: the engine shards the updates with their layers.

    The module is changed in place.

    Raises:
        ArgumentMeansNothing: ``enable_lora`` is False.
        NxdtError: the plugin ``lora`` is missing, or refuses an option.
    """

    @binds
    def __init__(self, module: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        if not config.enable_lora:
            raise refused("LoRAModel", "enable_lora", False)
        component, options = Kernel.start().registry.get("adapter", "lora"), config.section()
        section: Any = component.load_config()
        adapter: Any = component.load_target()(section(**{key: options[key] for key in options.keys() - {"name"}}))
        known = {name: parameter.dtype for name, parameter in module.named_parameters()}
        alone = NxDConfig(tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_config=None)
        alone |= {"sequence_parallel": False, "activation_checkpoint_config": None}
        adapter.apply(module, plan_of(module, alone))
        added = {name: parameter for name, parameter in module.named_parameters() if name not in known}
        for parameter in added.values():
            parameter.data = parameter.data.to(next(iter(known.values())))
        with torch.no_grad():
            initialize(added.items(), adapter.init_rules(), seed=_SEED)
        self.module = module
        self.lora_config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        return self.module(*args, **kwargs)
