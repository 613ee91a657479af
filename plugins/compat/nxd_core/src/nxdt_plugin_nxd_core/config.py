"""``neuronx_distributed_config`` and its ``LoraConfig``: from NxD Core's arguments to a started engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nxdt_core.config import load as load_config
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.train import TrainSession, start_engine
from nxdt_plugin_nxd_core.arguments import FIXED, binds, check, expect, refused
from nxdt_plugin_nxd_core.errors import ConfigNotMade, WorldDoesNotDivide

_log = logging.getLogger(__name__)

_CALL = "neuronx_distributed_config"

RECOMPUTED = "selected"
"""Name, in ``ParallelPlan.recompute``, of the modules of the class that the caller names."""

_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "pipeline_config": {
        **{"num_microbatches": 1, "transformer_layer_cls": None, "virtual_pipeline_size": 1, "pipeline_cuts": None},
        **{"output_loss_value_spec": None, "input_names": None, "hidden_size": None},
    },
    "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
}
"""Keys of each section with their defaults."""

DIMENSIONS = ("pp", "dp", "tp")
"""Dimensions of :attr:`NxDConfig.mesh`."""


class NxDConfig(dict[str, Any]):
    """The arguments of ``neuronx_distributed_config`` with their defaults, and the run that they began."""

    session: TrainSession
    engine: ParallelEngine
    mesh: DeviceMesh | None = None
    """This rank's groups in :data:`DIMENSIONS`, separate from those of the engine, whose meshes are not part of its
    protocol; None in a program of one process without a process group."""
    model: Any = None
    """Model that ``initialize_parallel_model`` returned."""
    optimizers: Sequence[Any] = ()
    """Optimizers over the parameters of ``model``."""
    saves: Any = None
    """Manager of the saves that ``save_checkpoint`` has in flight for the process group, or had last."""

    @property
    def pipeline(self) -> Mapping[str, Any]:
        """``pipeline_config`` with its defaults."""
        return {**_SECTIONS["pipeline_config"], **(self["pipeline_config"] or {})}

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self["pipeline_parallel_size"])

    def rank(self, dimension: str) -> int:
        """Return this rank's number along a dimension of the mesh."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(dimension)


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
        """Return the keys of the section ``adapter`` that mean the same."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        for name in values.keys() & {"target_modules", "modules_to_save"}:
            values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        return values


LoraConfig.__init__ = binds(LoraConfig.__init__)  # type: ignore[method-assign]


_RUNS: dict[dist.ProcessGroup | None, NxDConfig] = {}
"""Configuration that was made last, by the process group of the world; functions of NxD Core without that argument use
it. A single process has the key None, since it may get a group later."""


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def current_config() -> NxDConfig | None:
    """Return what ``neuronx_distributed_config`` returned last in this process group; None before that."""
    return _RUNS.get(_world())


def required_config(call: str) -> NxDConfig:
    """Return what ``neuronx_distributed_config`` returned last, or raise ``ConfigNotMade`` before that."""
    config = current_config()
    if config is None:
        raise ConfigNotMade(call=call)
    return config


@binds
def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: str | type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: LoraConfig | None = None,
) -> NxDConfig:
    """Join the process group, build the mesh, and return what the other functions take. Collective.

    Args:
        tensor_parallel_size: ranks that share each parallel layer.
        pipeline_parallel_size: ranks that share the list of layers.
        pipeline_config: ``num_microbatches``, ``transformer_layer_cls``, ``pipeline_cuts``,
            ``virtual_pipeline_size``, ``output_loss_value_spec``, ``hidden_size``; keys of NxD Core's tracer are noted.
        optimizer_config: ``zero_one_enabled``, ``grad_clipping``, ``max_grad_norm``.
        activation_checkpoint_config: ``"full"`` recomputes each layer; a class of modules (or several) those.
        sequence_parallel: shard hidden states between parallel layers along the sequence.
        model_init_config: ``meta_device_init`` with ``param_init_fn``; ``sequential_move_factor`` is noted.
        lora_config: a :class:`nxdt_plugin_nxd_core.LoraConfig`.

    Raises:
        CallDoesNotBind: an argument that is unknown.
        ArgumentMeansNothing: an argument that cannot mean anything here.
        WorldDoesNotDivide: the processes do not fall into groups of these sizes.
        ConfigError: sizes that the engine refuses.
    """
    config = NxDConfig(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        pipeline_config=dict(pipeline_config) if pipeline_config else None,
        optimizer_config={**_SECTIONS["optimizer_config"], **(optimizer_config or {})},
        activation_checkpoint_config=activation_checkpoint_config,
        pad_model=False,
        sequence_parallel=sequence_parallel,
        model_init_config={**_SECTIONS["model_init_config"], **(model_init_config or {})},
        lora_config=lora_config,
    )
    for section, defaults in _SECTIONS.items():
        for key, value in (config[section] or {}).items():
            argument = f"{section}[{key!r}]"
            if key in FIXED.get(section, {}):
                _log.warning("%s has no effect: %s", argument, FIXED[section][key].reason)
            elif key not in defaults:
                raise refused(_CALL, argument, repr(value), "unknown key", known=", ".join(sorted(defaults)))
            elif value is not defaults[key]:
                check(_CALL, argument, value, key)
    micro_batches, stages = config.pipeline["num_microbatches"], config.stages
    what = f"an integer of at least {stages}, one micro-batch per stage"
    enough = type(micro_batches) is int and micro_batches >= stages
    expect(_CALL, "pipeline_config['num_microbatches']", micro_batches, what, when=enough)
    optimizer = config["optimizer_config"]
    if optimizer["grad_clipping"]:
        check(_CALL, "optimizer_config['max_grad_norm']", optimizer["max_grad_norm"], "max_norm")
    init = config["model_init_config"]
    if init["meta_device_init"] and init["param_init_fn"] is None:
        raise refused(_CALL, "model_init_config['meta_device_init']", True)
    place = read_rank_environment()
    group = tensor_parallel_size * pipeline_parallel_size
    if min(tensor_parallel_size, pipeline_parallel_size) < 1 or place.world_size % group:
        raise WorldDoesNotDivide(world=place.world_size, tp=tensor_parallel_size, pp=pipeline_parallel_size)

    # The run as the configuration schema says it.
    selected = activation_checkpoint_config not in (None, "full")
    run: dict[str, Any] = {
        "name": "nxd-core",
        "parallel_engine": {"name": "torch"},
        "trainer": {"devices": place.world_size, "num_nodes": 1, "max_steps": 1 << 40, "gradient_clip_val": None},
        "data": {
            "name": "none",
            "seq_length": tensor_parallel_size,
            "global_batch_size": micro_batches * (place.world_size // group),
        },
        "distributed_strategy": {
            "tensor_model_parallel_size": tensor_parallel_size,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": config.pipeline["virtual_pipeline_size"],
            "sequence_parallel": sequence_parallel,
            "zero1": optimizer["zero_one_enabled"],
        },
        "model": {
            "name": "nxd-core-module",
            "optim": {"name": "adamw", "lr": 1.0, "sched": {"name": "constant"}},
            "pipeline_cuts": config.pipeline["pipeline_cuts"] or None,
            "activations_checkpoint_granularity": "selective" if selected else activation_checkpoint_config,
            "activations_checkpoint_recompute": [RECOMPUTED] if selected else None,
        },
        "precision": {"type": "fp32"},
        "adapter": {"name": "lora", **lora_config.section()} if lora_config and lora_config.enable_lora else {},
    }
    config.session = TrainSession(load_config(run, label=_CALL))
    config.engine = config.session.engine
    ranks = config.engine.ranks
    if place.launcher and place.world_size == 1 and isinstance(ranks, Ranks):  # the loop may ask torch for its rank
        ranks.start_alone(config.engine.device)
    start_engine(config.session.config, config.engine)
    if dist.is_initialized():
        sizes = (pipeline_parallel_size, place.world_size // group, tensor_parallel_size)
        config.mesh = init_device_mesh(config.engine.device.type, sizes, mesh_dim_names=DIMENSIONS)
    config.saves = getattr(current_config(), "saves", None)
    _RUNS.clear()  # those of groups that have ended, too
    _RUNS[_world()] = config
    return config


def config_of(nxd_config: Any, call: str) -> NxDConfig:
    """Return ``nxd_config``, or raise ``ArgumentMeansNothing`` where it is not from ``neuronx_distributed_config``."""
    if isinstance(nxd_config, NxDConfig):
        return nxd_config
    raise refused(call, "nxd_config", type(nxd_config).__name__)
