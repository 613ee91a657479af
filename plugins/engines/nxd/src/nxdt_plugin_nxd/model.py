"""A model on the library's layers: passes over the micro-batches of one global batch, and what the optimizer updates.

That is this data parallel rank's part of parameters, or of their float32 masters. Under ZeRO-1 a rank updates its part
of each parameter along the first dimension, and keeps the optimizer's state for that alone; afterwards the ranks gather
the parts. A parameter that does not divide is updated by all of them. (The library's own ZeRO-1 accepts tensors on a
device of torch-xla only, and its state has no place in the whole model.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import comm, parallel_state
from neuronx_distributed.parallel_layers.grads import bucket_allreduce_gradients, clip_grads_with_norm, get_grad_norm
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.optimizer import TorchOptimizer
from nxdt_core.engine.parameters import check_loadable
from nxdt_core.errors.training import OptimizerNeedsWholeParameters
from nxdt_core.models.loss import cross_entropies
from nxdt_core.models.random.rounding import rounded_block
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard
from nxdt_core.protocols.parallel_model import ParallelModel, StepLoss, TokenMeasure
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_plugin_nxd.layout import LocalParameter, Stage, parameters_of, round_to, whole_logits
from nxdt_plugin_nxd.lazy_device import end_of_step
from nxdt_plugin_nxd.library import computes_on_host
from nxdt_plugin_nxd.passes import ComputeContext, GlobalBatch, Pipeline

_OF_THE_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
"""Torch's optimizers whose updates are not made element by element."""
_BY_ELEMENT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)
Build = Callable[[list[ParameterGroup]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTensor:
    """A tensor that the optimizer updates."""

    local: LocalParameter
    tensor: nn.Parameter
    """The parameter itself where nothing is divided and no master is kept."""
    part: int
    parts: int
    groups: tuple[dist.ProcessGroup, ...]
    """Ranks that have other elements of the parameter."""

    def region(self) -> TensorSlice:
        """Return the place of its elements in the whole parameter."""
        outer, size = self.local.region, self.tensor.shape[0] if self.tensor.ndim else 0
        if self.parts == 1:
            return outer
        offsets = (outer.offsets[0] + self.part * size, *outer.offsets[1:])
        return TensorSlice(offsets, (size, *outer.shape[1:]))

    def local_shard(self, value: torch.Tensor) -> torch.Tensor | LocalShard:
        """Return a tensor of this one's shape as a checkpoint takes it."""
        return self.local.local_shard(value) if self.parts == 1 else LocalShard(value, self.local.shape, self.region())

    def placed(self) -> ParameterShard:
        """Return the optimizer's record of where this parameter is."""
        shape = self.local.shape
        return ParameterShard(shape=shape, region=self.region(), groups=self.groups, matrix=len(shape) >= 2)

    @torch.no_grad()
    def give(self, groups: object, rounding: tuple[int, str] | None = None) -> None:
        """Hand the values of all parts to the parameter, after an update. Collective along ``groups``.

        ``rounding`` is a seed and a name, by which they are rounded stochastically as by the torch engine.
        """
        if self.tensor is self.local.parameter:
            return
        value = self.tensor.detach()
        if rounding is not None:
            (seed, name), shape, offsets = rounding, self.local.shape, self.region().offsets
            value = rounded_block(value, seed=seed, name=name, shape=shape, offsets=offsets)
        value = value.to(self.local.parameter.dtype)
        if self.parts > 1:
            value = comm.all_gather(value, dim=0, groups=groups, pin_layout=False)
        self.local.parameter.copy_(value)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the parameter's shape."""
        return whole.detach().chunk(self.parts)[self.part] if self.parts > 1 else whole.detach()


class NxdModel(ParallelModel):
    """This rank's part of a model; see :class:`nxdt_core.protocols.parallel_model.ParallelModel`."""

    def __init__(
        self,
        stage: Stage,
        compute: ComputeContext,
        precision: PrecisionPolicy,
        *,
        sequence_parallel: bool,
    ) -> None:
        """``stage`` has its weights; where masters are kept, in their dtype. Collective in a pipeline."""
        self._stage, self._compute, place = stage, compute, compute.place
        self.device, self.plan = compute.device, stage.plan
        self.added, self.data_ranks = stage.added, place.sizes.dp
        tensor_group = parallel_state.get_tensor_model_parallel_group() if place.sizes.tp > 1 else None
        expert_group = parallel_state.get_expert_model_parallel_group() if place.sizes.ep > 1 else None
        self.local: Mapping[str, LocalParameter] = parameters_of(stage, place)
        """Parameters of this rank by global name."""
        self.trained: dict[str, TrainedTensor] = {}
        """Tensors that the optimizer updates, by global name."""
        self._masters = precision.master_weights
        for name, local in self.local.items():
            parameter = local.parameter
            if not parameter.requires_grad:
                continue
            # This rank's part of the optimizer's state, and the data parallel ranks that share it: they hold the same.
            part, parts, group = 0, 1, None
            if place.sizes.zero_stage and local.distributed:
                part, parts = place.expert_dp, place.sizes.efsdp
                group = parallel_state.get_expert_data_parallel_group()
            elif place.sizes.zero_stage:
                part, parts, group = place.dp, place.sizes.dp, compute.data_group
            if parts == 1 or parameter.ndim == 0 or parameter.shape[0] % parts:
                part, parts = 0, 1
            tensor = parameter
            if parts > 1 or self._masters:
                values = parameter.detach().chunk(parts)[part] if parts > 1 else parameter.detach()
                tensor = nn.Parameter(values.to(torch.float32 if self._masters else parameter.dtype, copy=True))
            over = (
                tensor_group if local.shard is not None else None,
                expert_group if local.distributed else None,
                group if parts > 1 else None,
            )
            groups = tuple(group for group in over if group is not None)
            self.trained[name] = TrainedTensor(local=local, tensor=tensor, part=part, parts=parts, groups=groups)
        # On a device, the Neuron runtime rounds; environment variables enable it.
        self._rounds_on_host = precision.stochastic_rounding and computes_on_host()
        if self._masters:
            round_to(stage, getattr(torch, precision.parameters))
        # Gradients are summed over micro-batches in their dtype, after each backward; the sums are in an attribute that
        # the library knows, too.
        gradients: torch.dtype = getattr(torch, precision.gradients)

        def add(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            gradient, before = parameter.grad.to(gradients), parameter.main_grad  # type: ignore[attr-defined]
            parameter.main_grad = gradient if before is None else before.add_(gradient)  # type: ignore[attr-defined]
            parameter.grad = None

        for parameter in (local.parameter for local in self.local.values()):
            if parameter.requires_grad and parameter.dtype != gradients:
                parameter.main_grad = None  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self._sequence_multiple = place.sizes.tp if sequence_parallel else 1
        self._metric_names: dict[type, tuple[str, ...]] = {}
        self._step = 0
        sizes = place.sizes
        self._pipeline = Pipeline(stage.modules, compute) if sizes.pp > 1 else None
        tied = stage.plan.tied if sizes.pp > 1 else ()
        # Collective: every stage calls it, and those in between get none.
        self._tied_group = parallel_state.create_pg_with_ranks([0, sizes.pp - 1]) if tied else None
        self._tied = [owner for owner, _ in tied if owner in self.local]
        names = stage.named_parameters().keys()
        saved = {name: value for module in stage.modules for name, value in module.state_dict().items()}
        self._buffers = {name: value for name, value in saved.items() if name not in names}

    def begin_step(self, step: int) -> None:
        """Set the number of the coming step, which dropout and stochastic rounding depend on."""
        self._step = step
        if self._rounds_on_host:
            self.weights_changed()

    # Passes over a global batch

    def run_train(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Accumulate the gradients of the global batch's loss, one micro-batch on the device at a time."""
        return self._run(micro_batches, objective, scale=self.data_ranks)  # the library divides sums of gradients by it

    @torch.no_grad()
    def run_eval(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Return the loss in evaluation mode, without gradients."""
        return self._run(micro_batches, objective, scale=None)

    def _run(self, micro_batches: Sequence[Batch], objective: Objective, *, scale: int | None) -> StepLoss:
        """Run forward, and backward of each loss times ``scale`` where there is one."""
        self._set_training(scale is not None)
        batch = GlobalBatch(micro_batches, objective, self._compute, self._step, self._metric_names)
        if self._pipeline is not None:
            self._pipeline.run(batch.micro_batches, batch.step_context, batch.loss, scale=scale)
            return batch.result()
        for on_host in batch.micro_batches:
            moved = on_host.to(self.device)
            step = batch.step_context(moved)
            if scale is None:
                batch.loss(self._logits(moved, step), moved, step)
            else:  # in one expression: a name would hold the graph until the next micro-batch has its own
                (batch.loss(self._logits(moved, step), moved, step) * scale).backward()  # type: ignore[no-untyped-call]
        return batch.result()

    def log_probs(self, micro_batches: Sequence[Batch], measure: TokenMeasure | None = None) -> list[torch.Tensor]:
        """Return the log-probability of each label, 0 where there is none."""

        def log_probs(logits: torch.Tensor, labels: torch.Tensor, step: StepContext) -> torch.Tensor:
            return cross_entropies(logits, labels, step).neg().masked_fill(labels == IGNORE_INDEX, 0)

        passing = _TokenValues(measure or log_probs)
        self.run_eval(micro_batches, passing)
        values = iter(passing.values)
        return [self._from_last_stage(next(values, None), batch.labels.shape) for batch in micro_batches]

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token, of the whole vocabulary."""
        self._set_training(False)
        length = input_ids.shape[1]
        padded = functional.pad(input_ids, (0, -length % self._sequence_multiple))  # no token sees a later one
        batch = Batch(input_ids=padded, labels=padded)
        if self._pipeline is None:
            return whole_logits(self._logits(batch.to(self._compute.device), StepContext()))[:, :length]
        outputs: list[torch.Tensor] = []

        def collect(logits: Any, *_: object) -> torch.Tensor:
            outputs.append(whole_logits(logits))
            return outputs[0].sum()

        self._pipeline.run([batch], lambda _: StepContext(), collect)
        shape = max(self._compute.ranks.all_gather_object(tuple(outputs[0].shape) if outputs else ()), key=len)
        return self._from_last_stage(outputs[0] if outputs else None, shape)[:, :length]

    def _from_last_stage(self, value: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        """Return what the last pipeline stage has, on every rank. Collective in a pipeline."""
        if self._compute.pipeline_group is None:
            assert value is not None
            return value
        result = torch.zeros(shape, device=self._compute.device) if value is None else value.float()
        dist.all_reduce(result, group=self._compute.pipeline_group)
        return result

    def _set_training(self, mode: bool) -> None:
        for module in self._stage.modules:
            module.train(mode)

    def _logits(self, batch: Batch, step: StepContext) -> Any:
        with self._compute.autocast():
            return self._stage.modules[0](batch.input_ids, batch.position_ids, batch.document_ids, step=step)

    # Weights

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their global names; a tied one under its owner's."""
        return ((name, local.parameter) for name, local in self.local.items())

    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Return parameters and saved buffers; a tied one once."""
        weights = {name: local.local_shard(local.parameter.detach()) for name, local in self.local.items()}
        if self._masters:
            weights |= {name: trained.local_shard(trained.tensor.detach()) for name, trained in self.trained.items()}
        return weights | self._buffers

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard], *, strict: bool = True) -> None:
        """Copy ``state`` into the parameters: shards of this layout.

        Raises:
            WeightsDoNotFit: names or shapes differ (with ``strict=False``: shapes only).
        """
        target = self.state_dict()
        check_loadable(target, state, strict=strict)
        for name, value in state.items():
            if name in target:
                elements(target[name]).copy_(elements(value))
        if self._masters:
            self.weights_changed()
            return
        for trained in self.trained.values():
            if trained.tensor is not trained.local.parameter:
                trained.tensor.copy_(trained.part_of(trained.local.parameter))

    def weights_changed(self) -> None:
        """Hand what the optimizer has updated to the parameters. Collective."""
        as_list = not computes_on_host()
        groups = experts = None
        if self.data_ranks > 1:
            groups = parallel_state.get_data_parallel_group(as_list=as_list)
            experts = parallel_state.get_expert_data_parallel_group(as_list=as_list)
        for name, trained in self.trained.items():
            rounding = (self._compute.seed, f"rounding\0{self._step}\0{name}") if self._rounds_on_host else None
            trained.give(experts if trained.local.distributed else groups, rounding)

    def parameter_norm(self) -> torch.Tensor:
        """Return the 2-norm of all weights, each element counted once."""
        return _norm([(local.parameter, local.parameter.detach()) for local in self.local.values()])

    def local_modules(self) -> Sequence[nn.Module]:
        """Return the modules of this rank's stages."""
        return list(self._stage.modules)

    # Gradients

    def finish_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Complete the gradients' sums over ranks, clip them, and return their norm before clipping."""
        sums: dict[str, torch.Tensor] = {}
        for name, local in self.local.items():
            summed = getattr(local.parameter, "main_grad", None)
            gradient = local.parameter.grad if summed is None else summed
            if gradient is not None:
                sums[name] = gradient
        as_list = not computes_on_host()
        partials = [grad for name, grad in sums.items() if self.local[name].partial]
        if partials:
            comm.all_reduce("sum", partials, groups=parallel_state.get_tensor_model_parallel_group(as_list=as_list))
        shards = {name: self.local[name].shard for name in sums}
        copies = [sums[name] for name, shard in shards.items() if shard is not None and shard.copies > 1]
        if copies:
            comm.all_reduce("sum", copies, groups=parallel_state.get_kv_shared_group(as_list=as_list))
        if self._tied_group is not None:
            for name in self._tied:
                dist.all_reduce(sums[name], group=self._tied_group)
        if self.data_ranks > 1:
            # Over the ranks that hold the same experts; each has summed what the tokens of its expert parallel ranks
            # ask of its experts. All else is summed over those ranks, too.
            bucket_allreduce_gradients(list(sums.values()))
            if self._compute.place.sizes.ep > 1:
                others = [grad for name, grad in sums.items() if not self.local[name].distributed]
                bucket_allreduce_gradients(others, reduce_over_ep_group=True)
        norm = _norm([(local.parameter, sums.get(name)) for name, local in self.local.items()])
        if max_norm is not None and sums:
            clip_grads_with_norm(
                [_counted(self.local[name].parameter, grad) for name, grad in sums.items()], norm, max_norm
            )
        for name, trained in self.trained.items():
            gradient = sums.get(name)
            if trained.tensor is not trained.local.parameter and gradient is not None:
                gradient = trained.part_of(gradient).to(trained.tensor.dtype)
            trained.tensor.grad = gradient
        return norm

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for local in self.local.values():
            local.parameter.grad = None
            if hasattr(local.parameter, "main_grad"):
                local.parameter.main_grad = None
        for trained in self.trained.values():
            trained.tensor.grad = None


class _TokenValues(Objective):
    """An objective without a loss, which keeps a value of each token as micro-batches pass by."""

    def __init__(self, measure: TokenMeasure) -> None:
        self._measure = measure
        self.values: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        self.values.append(self._measure(logits, batch.labels, step))
        return ObjectiveOutput(loss_sum=self.values[-1].sum() * 0, weight=self.weight(batch))


def elements(tensor: torch.Tensor | LocalShard) -> torch.Tensor:
    """Return the local elements of a tensor or a shard."""
    return tensor.tensor if isinstance(tensor, LocalShard) else tensor


def _norm(tensors: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> torch.Tensor:
    """Return the 2-norm of one tensor per parameter over all ranks, each element counted once. Collective."""
    wide = [(parameter, None if value is None else value.float()) for parameter, value in tensors]
    norm: torch.Tensor = get_grad_norm([_counted(parameter, value) for parameter, value in wide])
    return norm.reshape(())


def _counted(parameter: nn.Parameter, values: torch.Tensor | None) -> nn.Parameter:
    """Return a parameter with ``values`` as its gradient, which is counted where that of the original is."""
    like = nn.Parameter(parameter.new_zeros((), dtype=torch.float32) if values is None else values, requires_grad=False)
    like.grad = values
    for name in ("shared", "tensor_model_parallel", "expert_model_parallel"):
        if hasattr(parameter, name):
            setattr(like, name, getattr(parameter, name))
    return like


class NxdOptimizer(TorchOptimizer):
    """The torch engine's optimizer over plain tensors, whose places in the whole parameters the model knows."""

    def __init__(self, model: NxdModel, build: Build, groups: Sequence[ParameterGroup], *, lr: float) -> None:
        """``lr`` is the peak that a rank without anything to train reports.

        Raises:
            OptimizerNeedsWholeParameters: the optimizer takes parts for wholes, or copies for parts.
        """
        self._model = model
        trained = {name: model.trained[name] for group in groups for name in group["names"]}

        def placed(of_tensors: list[ParameterGroup]) -> torch.optim.Optimizer:
            return build([{**group, "shards": [trained[n].placed() for n in group["names"]]} for group in of_tensors])

        super().__init__(
            placed,
            [{**group, "params": [trained[name].tensor for name in group["names"]]} for group in groups],
            partial(model.finish_gradients, None),
            after_step=model.weights_changed,
            before_step=model.begin_step,
            lr=lr,
            never_waits=profile_of(model.device).never_waits,
        )
        # Some optimizers take parts for wholes, and others copies for parts.
        cut = [name for name, tensor in trained.items() if tensor.parts > 1 or tensor.local.shard is not None]
        copied = [name for name in cut if (shard := trained[name].local.shard) is not None and shard.copies > 1]
        refused = cut if isinstance(self.inner, _OF_THE_WHOLE) else copied
        if refused and not isinstance(self.inner, _BY_ELEMENT):
            raise OptimizerNeedsWholeParameters(optimizer=type(self.inner).__name__, parameters=refused)

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Return the 2-norm of all gradients before clipping. Collective."""
        return self._model.finish_gradients(max_norm)

    def step(self) -> None:
        """Update, then clear the gradients."""
        super().step()
        self._model.clear_gradients()
        end_of_step(self._model.device)

    def _saved(self, name: str, value: torch.Tensor) -> torch.Tensor | LocalShard:
        trained = self._model.trained[name]
        return trained.local_shard(value) if value.shape == trained.tensor.shape else value

    def _loaded(self, name: str, value: torch.Tensor | LocalShard) -> torch.Tensor:
        return elements(value)
