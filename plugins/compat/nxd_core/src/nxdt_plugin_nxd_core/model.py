"""``initialize_parallel_model`` puts a caller's module in its layout; ``LoRAModel`` is one of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.shape_errors import name_shape_errors
from nxdt_core.kernel import Kernel
from nxdt_core.models.random.init import initialize
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import DType, PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.protocols.tensor_shards import LocalShard
from nxdt_core.train import build
from nxdt_plugin_nxd_core.arguments import binds, call_check, refused
from nxdt_plugin_nxd_core.builder import CallBatch, ModelLoss, ModuleBuilder, scaled_gradients, split
from nxdt_plugin_nxd_core.config import LoraConfig, NxDConfig, config_of
from nxdt_plugin_nxd_core.errors import ModelFnReturnsNoModule, ModulesDifferBetweenRanks, PipelineNeedsRunTrain
from nxdt_plugin_nxd_core.layers import plan_of

_CALL = "initialize_parallel_model"


@binds
def initialize_parallel_model(
    nxd_config: NxDConfig, model_fn: Callable[..., nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """Build the module on each rank, derive its plan from its layers, and return it in its layout. Collective.

    Each rank builds the whole module on its host, with the same random numbers, and keeps its part of the values.

    Args:
        model_fn: returns the module; its ``forward`` takes what ``run_train`` is called with.

    Raises:
        ModelFnReturnsNoModule: of ``model_fn``.
        ModulesDifferBetweenRanks: ranks built different modules.
        NxdtError: sizes that do not divide, and layouts that the module's layers do not allow.
    """
    config = config_of(nxd_config, _CALL)
    call_check(model_fn)(*model_args, **model_kwargs)
    # The module is built with the random numbers of rank 0.
    ranks, init = config.engine.ranks, config["model_init_config"]
    torch.set_rng_state(ranks.broadcast_object(torch.get_rng_state()))
    with torch.device("meta") if init["meta_device_init"] else nullcontext():
        module: Any = model_fn(*model_args, **model_kwargs)
    if not isinstance(module, nn.Module):
        raise ModelFnReturnsNoModule(found=type(module).__name__)
    if init["meta_device_init"]:
        module.to_empty(device=HOST)
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                init["param_init_fn"](part)
    plan, run = plan_of(module, config), config.session.config
    saved = module.state_dict(keep_vars=True)
    values = dict(module.named_parameters()) | {name: v for name, v in saved.items() if isinstance(v, torch.Tensor)}
    if ranks.world_size > 1:  # names, shapes and sums of values are the same everywhere
        sums = {name: (tuple(v.shape), float(v.detach().double().sum())) for name, v in values.items()}
        first, *others = ranks.all_gather_object(sums)
        for rank, other in enumerate(others, 1):
            if other != first:
                names = first.keys() ^ other.keys() or {name for name in first if first[name] != other[name]}
                raise ModulesDifferBetweenRanks(rank=rank, difference=f"'{min(names)}' has other values, or is missing")
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()} or {torch.float32}
    if len(dtypes) > 1 or not dtypes <= {torch.float64, torch.float32, torch.bfloat16}:
        raise refused(_CALL, "model_fn", ", ".join(sorted(map(str, dtypes))))
    dtype = cast(DType, str(dtypes.pop()).removeprefix("torch."))
    adapters = build.adapters(run)
    parallel = config.engine.initialize_model(
        ModuleBuilder(None, module, plan, config.pipeline["output_loss_value_spec"]),
        precision=PrecisionPolicy(name=dtype, parameters=dtype, gradients=dtype, optimizer_state=dtype),
        seed=run.run.seed,
        adapters=adapters,
        materialise=False,
    )
    model = NxDModel(parallel, config, module, plan)
    model.load_state_dict(values, strict=False)
    for adapter in adapters:
        adapter.begin(parallel, run, ranks)
    config.session.built_model = parallel
    config.model, config.optimizers = model, ()
    return model


class NxDModel(nn.Module):
    """This rank's part of a module: a ``torch.nn.Module`` whose names and parameters are those that this rank has."""

    parallel: ParallelModel
    """The model of the engine."""
    dtype: torch.dtype = torch.float32
    """Dtype of the parameters."""

    def __init__(self, parallel: ParallelModel, nxd_config: NxDConfig, original: nn.Module, plan: ParallelPlan) -> None:
        super().__init__()
        object.__setattr__(self, "parallel", parallel)  # so that nothing of it is registered twice
        self.nxd_config = nxd_config
        self.dtype = next((parameter.dtype for _, parameter in parallel.named_parameters()), torch.float32)
        if hasattr(original, "config"):
            self._config = original.config
        # In a pipeline, the last stage takes the loss out of what the module returns.
        self.loss_place = None if nxd_config.stages > 1 else nxd_config.pipeline["output_loss_value_spec"]
        """``output_loss_value_spec`` for what :meth:`forward` returns."""
        self._check, self._plan, self._has_run = call_check(original.forward), plan, False

    def local_module(self) -> nn.Module:
        """Return the module of this rank: its first stage, or the whole module without a pipeline."""
        return self.parallel.local_modules()[0]

    @property
    def config(self) -> Any:
        """The caller's ``module.config``."""
        return self._config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; ``backward`` of its loss gives gradients that the optimizer's step finishes.

        Raises:
            PipelineNeedsRunTrain: the module is shared out over a pipeline.
        """
        if self.nxd_config.stages > 1:
            raise PipelineNeedsRunTrain(stages=self.nxd_config.stages)
        self._check(*args, **kwargs)
        batch = CallBatch.of(args, kwargs).to(self.nxd_config.engine.device)
        step = StepContext(ids=batch.input_ids, vocabulary_loss=vocabulary_parallel_cross_entropies)
        run, world = self.nxd_config.session.config.run, self.nxd_config.engine.rank_info.world_size
        sizes = run.distributed_strategy.mesh_sizes(world)
        with nullcontext() if self._has_run else name_shape_errors(self.parallel.local_modules(), self._plan, sizes):
            output = self.local_module()(batch.input_ids, step=step, **batch.arguments())
        self._has_run = True
        return scaled_gradients(output, self.parallel.data_ranks)

    def run_train(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward, in a pipeline by micro-batches, and return the loss. Collective.

        Returns:
            The mean loss over micro-batches and data parallel ranks; equal on all ranks, without gradient.

        Raises:
            CallDoesNotBind: arguments that the module's forward does not take.
            BatchDoesNotDivide: the rows do not fall into ``num_microbatches`` equal parts.
            LossNotFound: the module returned none.
        """
        self.train()
        return self.parallel.run_train(self._batches(args, kwargs), ModelLoss(self.loss_place)).loss

    def run_eval(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss, forward only; as :meth:`run_train` otherwise."""
        return self.parallel.run_eval(self._batches(args, kwargs), ModelLoss(self.loss_place)).loss

    def _batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[CallBatch]:
        self._check(*args, **kwargs)
        return split(CallBatch.of(args, kwargs), self.nxd_config.pipeline["num_microbatches"])

    def train(self, mode: bool = True) -> NxDModel:
        """Set the mode of this rank's modules."""
        self.training = mode
        for module in self.parallel.local_modules() if hasattr(self, "parallel") else ():
            module.train(mode)
        return self

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their names in the whole module."""
        for name, parameter in self.parallel.named_parameters():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children of this rank's modules."""
        return chain(*(module.named_children() for module in self.parallel.local_modules()))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield this rank's modules."""
        return chain(*(module.named_modules(*args, **kwargs) for module in self.parallel.local_modules()))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's shards by name; :func:`save_checkpoint` saves the whole."""
        state = self.parallel.state_dict()
        return {name: value.tensor if isinstance(value, LocalShard) else value for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values in: whole tensors or larger shards, of which this rank takes its part, or shards as
        :meth:`state_dict` gives.

        Raises:
            WeightsDoNotFit: names or shapes differ.
        """
        state, parts = self.parallel.state_dict(), dict(state_dict)
        for name in state.keys() & parts.keys():
            place, value = local_shard_of(state[name], name), parts[name]
            if tuple(value.shape) == place.shape and place.tensor is not value:
                whole = local_shard_of(value, name)
                if place.region.intersection(whole.region) == place.region:
                    part = whole.tensor[place.region.within(whole.region)].detach()
                    parts[name] = LocalShard(part, place.shape, place.region)
        self.parallel.load_state_dict(parts, strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> NxDModel:
        """Return the model: it is on its device already. Another dtype is refused."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and dtype != self.dtype:
            self._apply(None)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NxDModel:
        raise refused("NxDModel", "conversion", "a new dtype or device")


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
        component = Kernel.start().registry.get("adapter", "lora")
        section: Any = component.load_config()
        adapter: Any = component.load_target()(section(**config.section()))
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        alone = NxDConfig(tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_config=None)
        alone |= {"sequence_parallel": False, "activation_checkpoint_config": None}
        adapter.apply(module, plan_of(module, alone))
        added = {name: parameter for name, parameter in module.named_parameters() if name not in dtypes}
        for parameter in added.values():
            parameter.data = parameter.data.to(next(iter(dtypes.values())))
        initialize(added.items(), adapter.init_rules(), seed=1234)
        self.module, self.lora_config = module, config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        return self.module(*args, **kwargs)
