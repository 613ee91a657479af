"""``neuronx_distributed_config``: from NxD Core's arguments to a resolved configuration and a started engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from nxdt_core.config import load as load_config
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.train.session import TrainSession, start_engine
from nxdt_plugin_nxd_core.arguments import binds, expect, refused
from nxdt_plugin_nxd_core.errors import WorldDoesNotDivide
from nxdt_plugin_nxd_core.groups import Groups
from nxdt_plugin_nxd_core.module_plan import RECOMPUTED, PlanWishes

__all__ = ["NxDConfig", "current_config", "neuronx_distributed_config"]

_log = logging.getLogger(__name__)

_SEED = 1234
_CALL = "neuronx_distributed_config"

_OPTIMIZER_CONFIG = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
_MODEL_INIT_CONFIG = {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}

_PIPELINE_KEYS = frozenset(
    {
        *("num_microbatches", "transformer_layer_cls", "virtual_pipeline_size", "pipeline_cuts"),
        *("output_loss_value_spec", "input_names", "hidden_size"),
    }
)
_PIPELINE_UNUSED = {
    "auto_partition": "cuts are chosen by computation unless pipeline_cuts names them",
    "leaf_module_cls": "nothing is traced",
    "autowrap_functions": "nothing is traced",
    "autowrap_modules": "nothing is traced",
    "autowrap_obj_methods": "nothing is traced",
    "tracer_cls": "nothing is traced",
    "trace_file_path": "nothing is traced",
    "use_zero1_optimizer": "optimizer_config decides",
    "return_loss_on_cpu": "the loss is a scalar on the device",
    "broadcast_and_average_loss": "run_train returns the mean on each rank",
    "deallocate_pipeline_outputs": "what was sent is freed once it has gone",
    "use_model_wrapper": "there is one wrapper",
    "use_optimizer_wrapper": "there is one wrapper",
    "param_init_fn": "model_init_config decides",
}
_KEPT = (
    *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_config", "optimizer_config"),
    *("activation_checkpoint_config", "pad_model", "sequence_parallel", "model_init_config", "lora_config"),
)


class NxDConfig(dict[str, Any]):
    """The arguments of ``neuronx_distributed_config`` with their defaults, and the run that they began."""

    session: TrainSession
    engine: ParallelEngine
    groups: Groups
    model: Any = None
    """What ``initialize_parallel_model`` returned."""
    optimizers: Sequence[Any] = ()
    """Those over the parameters of ``model``."""
    saves: Any = None
    """What ``save_checkpoint`` has in flight for the process group, or had last."""

    @property
    def wishes(self) -> PlanWishes:
        """What the arguments say of the module's plan."""
        pipeline, recompute = self["pipeline_config"] or {}, self["activation_checkpoint_config"]
        return PlanWishes(
            stages=self.stages,
            tensor_parallel=self["tensor_parallel_size"],
            layer_class=pipeline.get("transformer_layer_cls"),
            hidden_size=pipeline.get("hidden_size"),
            recompute_layers=recompute == "full",
            recompute_class=None if isinstance(recompute, str) else recompute,
            sequence_parallel=self["sequence_parallel"],
        )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self["pipeline_parallel_size"])

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a call of ``run_train``."""
        return int((self["pipeline_config"] or {}).get("num_microbatches", 1))

    @property
    def max_grad_norm(self) -> float | None:
        """To what gradients are clipped; None for not at all."""
        optimizer = self["optimizer_config"]
        return float(optimizer["max_grad_norm"]) if optimizer["grad_clipping"] else None


_RUNS: dict[dist.ProcessGroup | None, NxDConfig] = {}
"""What was made last, by the process group of the world; functions of NxD Core that take no configuration work on it.
A single process has the key None, since it may get a group later."""


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def current_config() -> NxDConfig | None:
    """Return what ``neuronx_distributed_config`` returned last in this process group; None before that."""
    return _RUNS.get(_world())


@binds(
    sequential_move_factor="each rank builds its module at once", lnc_size="the engine takes the device that it finds"
)
def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: str | type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> NxDConfig:
    """Join the process group, build the mesh, and return what the other functions take. Collective.

    Args:
        tensor_parallel_size: ranks that share each parallel layer.
        pipeline_parallel_size: ranks that share the list of layers.
        pipeline_config: ``num_microbatches``, ``transformer_layer_cls``, ``pipeline_cuts``,
            ``virtual_pipeline_size``, ``output_loss_value_spec``, ``hidden_size``; keys of NxD Core's tracer are noted.
        optimizer_config: ``zero_one_enabled``, ``grad_clipping``, ``max_grad_norm``.
        activation_checkpoint_config: ``"full"`` recomputes each layer; a class of modules (or several) those.
        pad_model: heads are not filled up here; True is refused.
        sequence_parallel: shard hidden states between parallel layers along the sequence.
        model_init_config: ``meta_device_init`` with ``param_init_fn``; ``sequential_move_factor`` is noted.
        lora_config: a :class:`nxdt_plugin_nxd_core.LoraConfig`.
        expert_parallel_size, context_parallel_size: 1, the only size for a caller's own module.
        mixed_precision_config: refused: the dtype of the module is that of the run.
        sequential_move_factor, lnc_size: no effect.

    Raises:
        CallDoesNotBind: an argument that is unknown.
        ArgumentMeansNothing: an argument that cannot mean anything here.
        WorldDoesNotDivide: the processes do not fall into groups of these sizes.
        ConfigError: sizes that the engine refuses.
    """
    made = NxDConfig(_checked(dict(locals())))
    place = read_rank_environment()
    group = tensor_parallel_size * pipeline_parallel_size
    if min(tensor_parallel_size, pipeline_parallel_size) < 1 or place.world_size % group:
        raise WorldDoesNotDivide(world=place.world_size, tp=tensor_parallel_size, pp=pipeline_parallel_size)
    made.session = TrainSession(load_config(_run(made, place.world_size), label=_CALL))
    made.engine = made.session.engine
    ranks = made.engine.ranks
    if place.launcher and place.world_size == 1 and isinstance(ranks, Ranks):  # the loop may ask torch for its rank
        ranks.start_alone(made.engine.device)
    start_engine(made.session.config, made.engine)
    made.groups = Groups(tensor_parallel_size, pipeline_parallel_size, ranks, made.engine.device)
    before = current_config()
    made.saves = None if before is None else before.saves
    _RUNS.clear()  # those of groups that have ended, too
    _RUNS[_world()] = made
    return made


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a run depends on, with their defaults.

    Args:
        given: all arguments of ``neuronx_distributed_config`` by name.

    Raises:
        ArgumentMeansNothing: one that cannot mean anything here.
    """
    sections = ("pipeline_config", "optimizer_config", "model_init_config")
    _check_types(
        {name: given[name] for name in ("tensor_parallel_size", "pipeline_parallel_size")},
        {name: given[name] for name in sections},
        given["lora_config"],
    )
    _check_absent(given["expert_parallel_size"], given["context_parallel_size"], given["mixed_precision_config"])
    pipeline = dict(given["pipeline_config"] or {})
    optimizer = _merged("optimizer_config", _OPTIMIZER_CONFIG, given["optimizer_config"])
    init = _merged("model_init_config", _MODEL_INIT_CONFIG, given["model_init_config"])
    _check(pipeline, given["activation_checkpoint_config"], init, pad_model=given["pad_model"])
    _check_numbers(pipeline, optimizer, given["pipeline_parallel_size"])
    for key in pipeline.keys() & _PIPELINE_UNUSED.keys():
        _log.warning("pipeline_config[%r] has no effect: %s", key, _PIPELINE_UNUSED[key])
    found = dict(zip(sections, (pipeline or None, optimizer, init), strict=True))
    return {name: found.get(name, given[name]) for name in _KEPT}


def _check_types(sizes: Mapping[str, Any], sections: Mapping[str, Any], lora_config: Any) -> None:
    for name, size in sizes.items():
        expect(_CALL, name, size, "an integer", when=type(size) is int)
    for name, section in sections.items():
        expect(_CALL, name, section, "a dictionary", when=section is None or isinstance(section, Mapping))
    expect(
        _CALL, "lora_config", lora_config, "a LoraConfig", when=lora_config is None or hasattr(lora_config, "section")
    )


def _check_absent(expert: Any, context: Any, mixed_precision: Any) -> None:
    advice = "Leave it out, or train the model as a plugin: distributed_strategy has this size for `nxdt train`."
    for name, size in (("expert_parallel_size", expert), ("context_parallel_size", context)):
        if size != 1:
            raise refused(_CALL, name, repr(size), "needs a model whose parts the engine knows", advice)
    if mixed_precision:
        reason = "would change the dtype that the module has"
        advice = "Leave it out, and give the module the dtype to train in: float32, or bfloat16 for less memory."
        raise refused(_CALL, "mixed_precision_config", repr(mixed_precision), reason, advice)


def _check_numbers(pipeline: Mapping[str, Any], optimizer: Mapping[str, Any], stages: int) -> None:
    micro_batches = pipeline.get("num_microbatches", 1)
    what = f"an integer of at least {stages}, one micro-batch per stage"
    when = type(micro_batches) is int and micro_batches >= stages
    expect(_CALL, "pipeline_config['num_microbatches']", micro_batches, what, when=when)
    for key in ("virtual_pipeline_size", "hidden_size"):
        value = pipeline.get(key)
        positive = type(value) is int and value >= 1
        expect(_CALL, f"pipeline_config['{key}']", value, "an integer of at least 1", when=value is None or positive)
    cuts = pipeline.get("pipeline_cuts")
    listed = isinstance(cuts, list | tuple) and all(isinstance(cut, str) for cut in cuts)
    expect(_CALL, "pipeline_config['pipeline_cuts']", cuts, "a list of names of layers", when=cuts is None or listed)
    layer = pipeline.get("transformer_layer_cls")
    is_class = isinstance(layer, type) and issubclass(layer, nn.Module)
    expect(
        _CALL, "pipeline_config['transformer_layer_cls']", layer, "a class of modules", when=layer is None or is_class
    )
    norm = optimizer["max_grad_norm"]
    number = isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0
    clips = bool(optimizer["grad_clipping"])
    expect(_CALL, "optimizer_config['max_grad_norm']", norm, "a number above 0", when=number or not clips)


def _merged(name: str, defaults: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    unknown = sorted((given or {}).keys() - defaults.keys())
    if unknown:
        value, advice = repr((given or {})[unknown[0]]), f"Known keys are {', '.join(defaults)}."
        raise refused(_CALL, f"{name}[{unknown[0]!r}]", value, "is unknown", advice)
    return {**defaults, **(given or {})}


def _check(pipeline: Mapping[str, Any], recompute: Any, init: Mapping[str, Any], *, pad_model: bool) -> None:
    classes = recompute if isinstance(recompute, tuple) else (recompute,)
    known = recompute in (None, "full") or all(
        isinstance(each, type) and issubclass(each, nn.Module) for each in classes
    )
    wrong = [
        (f"pipeline_config[{key!r}]", value, "is unknown", f"Known keys are {', '.join(sorted(_PIPELINE_KEYS))}.")
        for key, value in pipeline.items()
        if key not in _PIPELINE_KEYS | _PIPELINE_UNUSED.keys()
    ]
    if not known:
        advice = "Pass 'full', a class of modules, or None."
        wrong.append(("activation_checkpoint_config", recompute, "names nothing that is recomputed", advice))
    if pad_model:
        advice = "Leave it out, and choose a tensor_parallel_size that divides the numbers of heads."
        wrong.append(("pad_model", pad_model, "would change the caller's own modules", advice))
    makes = init["param_init_fn"]
    expect(_CALL, "model_init_config['param_init_fn']", makes, "a function", when=makes is None or callable(makes))
    if init["meta_device_init"] and makes is None:
        advice = "Pass param_init_fn, called with each module that has parameters, or leave meta_device_init out."
        wrong.append(("model_init_config['meta_device_init']", True, "needs param_init_fn", advice))
    for argument, value, reason, advice in wrong[:1]:
        raise refused(_CALL, argument, repr(value), reason, advice)


def _run(nxd_config: NxDConfig, world_size: int) -> dict[str, Any]:
    """The run as the configuration schema says it."""
    stages, micro_batches = nxd_config.stages, nxd_config.micro_batches
    tp, pipeline = nxd_config["tensor_parallel_size"], nxd_config["pipeline_config"] or {}
    recompute = nxd_config["activation_checkpoint_config"]
    model: dict[str, Any] = {
        "name": "nxd-core-module",
        "optim": {"name": "adamw", "lr": 1.0, "sched": {"name": "constant"}},
    }
    if recompute == "full":
        model["activations_checkpoint_granularity"] = "full"
    elif recompute is not None:
        model["activations_checkpoint_granularity"] = "selective"
        model["activations_checkpoint_recompute"] = [RECOMPUTED]
    if pipeline.get("pipeline_cuts"):
        model["pipeline_cuts"] = list(pipeline["pipeline_cuts"])
    run: dict[str, Any] = {
        "name": "nxd-core",
        "seed": _SEED,
        "parallel_engine": {"name": "torch"},
        "trainer": {"devices": world_size, "num_nodes": 1, "max_steps": 1 << 40, "gradient_clip_val": None},
        "data": {
            "name": "none",
            "seq_length": tp,
            "micro_batch_size": 1,
            "global_batch_size": micro_batches * (world_size // (tp * stages)),
        },
        "distributed_strategy": {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": int(pipeline.get("virtual_pipeline_size", 1)),
            "sequence_parallel": nxd_config["sequence_parallel"],
            "zero1": nxd_config["optimizer_config"]["zero_one_enabled"],
        },
        "model": model,
        "precision": {"type": "fp32"},
    }
    if nxd_config["lora_config"] is not None and nxd_config["lora_config"].enable_lora:
        run["adapter"] = nxd_config["lora_config"].section()
    return run


def config_of(nxd_config: Any, call: str) -> NxDConfig:
    """Return ``nxd_config``, checked.

    Raises:
        ArgumentMeansNothing: it is not from ``neuronx_distributed_config``.
    """
    if isinstance(nxd_config, NxDConfig):
        return nxd_config
    reason = "is not what neuronx_distributed_config returned"
    advice = "Pass its return value as it is, not a copy as a plain dict."
    raise refused(call, "nxd_config", type(nxd_config).__name__, reason, advice)
