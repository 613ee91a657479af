"""A model in its layout: forward and backward over the micro-batches of one global batch.

A pass has the weight of the batch, the losses of this rank's micro-batches, and their sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.collectives import copy_to_group, reduce_from_group
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.placement import is_dtensor, is_fsdp_module, local_of
from nxdt_core.engine.context.attention import shard_sequence, unshard_sequence
from nxdt_core.engine.data.fsdp import (
    begin_micro_batch,
    hooks_off,
    product_weights,
    scaled_weights,
)
from nxdt_core.engine.data.gradients import GradientReducer, global_norm
from nxdt_core.engine.decoding import (
    CachedDecoding,
    Recorded,
    RecordedDecoding,
    attention_slots,
    check_positions_stay,
    last_rows_only,
    records_passes,
)
from nxdt_core.engine.expert import RouterMetrics, exchange_padding
from nxdt_core.engine.layout import Layout
from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.optim.updates import StochasticRounding
from nxdt_core.engine.parameters import Replicas, StageParameters, check_loadable, shard_of
from nxdt_core.engine.pipeline.split import TiedCopies, sum_tied_gradients, tied_copies, tied_group
from nxdt_core.engine.precision import CopiedMasters, rounded_weights
from nxdt_core.engine.shape_errors import name_shape_errors
from nxdt_core.engine.tensor.layers import unpadded_shard
from nxdt_core.errors.models import LogitsAreSharded
from nxdt_core.models.attention.cache import KeyValueCache
from nxdt_core.models.loss import IN_CHUNKS, RowKernels, log_probs, whole_vocabulary_cross_entropies
from nxdt_core.models.random.dropout import step_numbers
from nxdt_core.models.step_boundary import called_with_step
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, check_weight
from nxdt_core.protocols.parallel_model import CacheUnsupported, Decoding, ParallelModel, StepLoss, TokenMeasure
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import SequenceShards, StepContext, VocabularyLoss
from nxdt_core.protocols.tensor_shards import LocalShard

if TYPE_CHECKING:
    from nxdt_core.engine.pipeline.runner import PipelineRunner


class ComputeContext:
    """The device on which a run computes, and its dtypes."""

    def __init__(
        self,
        precision: PrecisionPolicy,
        device: torch.device,
        seed: int = 0,
        rows: RowKernels = IN_CHUNKS,
        *,
        pins: bool = False,
    ) -> None:
        """``seed``: of dropout and of what is rounded stochastically; ``rows``: what computes on logits; ``pins``:
        whether inputs are copied to the device out of pinned memory."""
        self.device = device
        self.seed = seed
        self.rows = rows
        self.pins = pins
        self.precision = precision
        rounds = precision.stochastic_rounding and precision.master_weights
        self.masters_rounded = StochasticRounding(seed=seed) if rounds else None
        """How masters are rounded to what is computed with; None: to the nearest, or there are none."""
        self.metrics_dtype = torch.float64 if precision.gradients == "float64" else torch.float32
        """Dtype of losses and norms."""
        self.hidden: torch.dtype = getattr(torch, precision.parameters)
        """Dtype of hidden states between layers: autocast lets the residual stream keep the parameters' dtype."""
        self._autocast: torch.dtype | None = None if precision.autocast is None else getattr(torch, precision.autocast)
        self.sent = self._autocast or self.hidden
        """Dtype of hidden states that are sent to another pipeline stage."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host in memory from which a copy to the device does not wait for its kernels."""
        return tensor.pin_memory() if tensor.device == HOST else tensor

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for forward and the loss; backward runs outside of it."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)


class GlobalBatch:
    """This rank's micro-batches of one step, and what they add to the loss of all."""

    def __init__(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        mesh: ParallelMesh,
        compute: ComputeContext,
        metric_names: dict[type, tuple[str, ...]],
        step: int = 0,
        mixed_parts: int = 0,
    ) -> None:
        """Sum the weight over all ranks; ``micro_batches`` stay on the host until they are run.

        ``step``: number of the step, which random numbers depend on.
        ``metric_names``: those of each kind of objective, agreed between ranks once.
        ``mixed_parts``: parts of each sequence whose tokens data parallel ranks exchange before experts; 0: none.
        """
        self._metric_names, self._objective, self._mesh, self._compute = metric_names, objective, mesh, compute
        # The objective's terms, then the number of tokens, the divisor of auxiliary losses. They are computed from the
        # host's copy of the batch, without waiting for a kernel.
        of_batches = [
            torch.cat([objective.weight(batch).reshape(-1), batch.tokens().reshape(1)]) for batch in micro_batches
        ]
        weights = torch.stack(of_batches).sum(0)
        if compute.pins:  # a device may still read the host's copy after it is freed, if that is not pinned
            weights = compute.pinned(weights)
        weights = weights.to(compute.device, non_blocking=compute.pins)
        if mesh.group("world") is not None:
            if any(mesh.rank(dim) for dim in ("pp", "cp", "tp")):  # only one of those that read the same samples
                weights = torch.zeros_like(weights)
            dist.all_reduce(weights)
        self.weight = weights[0]
        divisors = torch.where(weights > 0, weights, torch.ones_like(weights))
        self._divisors, self._tokens = divisors[:-1], divisors[-1]
        self._step, self._aux_loss_scale, self._mixed_parts = step, 1 / self._tokens, mixed_parts
        group = mesh.group("cp")
        self._sequences = SequenceShards()
        """Ranks that share sequences, and the sum over them, of which each has the gradient."""
        if group is not None:
            self._sequences = SequenceShards(
                ranks=group.size(), total=lambda part: copy_to_group(reduce_from_group(part, group), group)
            )
        loss = vocabulary_parallel_cross_entropies if mesh.sizes.tp > 1 else whole_vocabulary_cross_entropies
        self._vocabulary_loss: VocabularyLoss = partial(loss, kernels=compute.rows)
        self.micro_batches: list[Batch] = []
        """Micro-batches as the model receives them: this rank's part of every sequence."""
        self._losses: list[torch.Tensor] = []
        self._metrics: dict[str, list[torch.Tensor]] = {}
        row = mesh.rank("dp") * sum(batch.input_ids.shape[0] for batch in micro_batches)  # ranks hold equally many rows
        for batch in micro_batches:
            shard = replace(batch, first_row=row)
            if mesh.sizes.cp > 1:
                shard = shard_sequence(shard, mesh)
            self.micro_batches.append(shard.map(compute.pinned) if compute.pins else shard)
            row += batch.input_ids.shape[0]

    def step_context(self, batch: Batch) -> StepContext:
        """Return what the passes of a micro-batch on the device depend on in addition to it. Collective where ranks
        exchange tokens before experts."""
        padding = batch.padding_mask()
        if self._mixed_parts:
            padding = torch.zeros_like(batch.labels, dtype=torch.bool) if padding is None else padding
            padding = exchange_padding(padding, self._mesh, parts=self._mixed_parts)
        return StepContext(
            numbers=step_numbers(self._compute.seed, self._step, batch),
            ids=batch.input_ids,
            padding=padding,
            labels=batch.labels,
            head_loss=self._objective.head_loss,
            aux_loss_scale=self._aux_loss_scale,
            vocabulary_loss=self._vocabulary_loss,
            sequences=self._sequences,
        )

    def loss(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> torch.Tensor:
        """Return the share of one micro-batch in the loss of the global batch."""
        with self._compute.autocast():
            output = objective_output(self._objective, logits, batch, step)
        # Once, since it waits for the device; of a part of each sequence, weights may be of the part or of the whole.
        first = not self._losses and type(self._objective) not in self._metric_names
        if first and step.sequences.ranks == 1:
            check_weight(self._objective, output, batch)
        loss = self._mean(output.loss_sum)
        self._losses.append(loss.detach())
        for name, value in output.metrics.items():
            self._metrics.setdefault(name, []).append(self._mean(value.detach()))
        return loss

    def _mean(self, sums: torch.Tensor) -> torch.Tensor:
        """The terms of ``sums``, each divided by its own weight, together."""
        return (sums.reshape(-1) / self._divisors[: sums.numel()]).sum()

    def result(self, routers: RouterMetrics | None) -> StepLoss:
        """Return the loss and metrics of the global batch, equal on all ranks; ``routers`` of a model with experts have
        counted it."""
        metrics = {name: torch.stack(values).sum() for name, values in self._metrics.items()}
        kind, names = type(self._objective), self._metric_names
        if self._mesh.sizes.pp == 1:
            names[kind] = tuple(metrics)
        elif kind not in names:  # which only the last stage of a pipeline knows by itself
            of_ranks: list[tuple[str, ...]] = [()] * self._mesh.sizes.world_size
            dist.all_gather_object(of_ranks, tuple(metrics))
            names[kind] = max(of_ranks, key=len)
        counts = None if routers is None else routers.sums
        if self._mesh.group("world") is None:
            loss = torch.stack(self._losses).sum()
        else:
            sums = torch.zeros(1 + len(names[kind]), dtype=self._compute.metrics_dtype, device=self._compute.device)
            if self._losses:
                sums += torch.stack([torch.stack(self._losses).sum(), *map(metrics.__getitem__, names[kind])]).to(sums)
            together = sums if counts is None else torch.cat((sums, counts.flatten()))
            if self._mesh.rank("tp"):  # tensor parallel ranks have the same
                together.zero_()
            dist.all_reduce(together)
            loss, metrics = together[0], dict(zip(names[kind], together[1 : len(sums)], strict=True))
            counts = None if counts is None else together[len(sums) :].view_as(counts)
        if routers is not None and counts is not None:
            metrics |= routers.metrics(counts)
        return StepLoss(loss=loss, weight=self.weight, metrics=metrics)


def objective_output(objective: Objective, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
    """Return what ``objective`` makes of a micro-batch.

    Raises:
        LogitsAreSharded: it computes with logits of which each rank holds a part.
    """
    try:
        output: ObjectiveOutput = called_with_step(objective, step, logits, batch)
    except RuntimeError as error:
        if is_dtensor(logits) and ("DTensor" in str(error) or "sharding strategy" in str(error)):
            reason = str(error).partition(",")[0].partition("\n")[0]
            raise LogitsAreSharded(objective=type(objective).__name__, reason=reason) from error
        raise
    for name, value in {"loss_sum": output.loss_sum, "weight": output.weight, **output.metrics}.items():
        if is_dtensor(value):
            reason = f"its {name} is a DTensor"
            raise LogitsAreSharded(objective=type(objective).__name__, reason=reason)
    return output


class TokenValues(Objective):
    """An objective without a loss, which keeps a value of each token as micro-batches pass by."""

    def __init__(self, measure: TokenMeasure | None = None) -> None:
        """``measure``: as of :meth:`nxdt_core.protocols.parallel_model.ParallelModel.log_probs`."""
        self._measure = measure or log_probs
        self.values: list[torch.Tensor] = []
        """Values of each micro-batch that passed by, float [rows, seq / cp]."""

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """Keep what ``logits`` [micro_batch, seq, vocab] are measured to be."""
        self.values.append(self._measure(logits, batch.labels, step).detach())
        return ObjectiveOutput(loss_sum=self.values[-1].new_zeros(()), weight=self.weight(batch))


class TorchModel(ParallelModel):
    """This rank's part of a model; see :class:`nxdt_core.protocols.parallel_model.ParallelModel`."""

    def __init__(self, layout: Layout, mesh: ParallelMesh, compute: ComputeContext) -> None:
        """Collective in a pipeline.

        Args:
            layout: materialised.
            mesh: that ``layout`` was made for.
            compute: device, dtypes and seed.
        """
        self._layout, self._mesh, self._compute = layout, mesh, compute
        self.module = layout.modules[0]
        """The first of this rank's stages: the whole model without a pipeline."""
        self.plan, self.precision, self.padded = layout.plan, compute.precision, layout.padded
        self.added, self.data_ranks = layout.added, mesh.sizes.dp
        self._parameters = StageParameters(layout.modules, layout.plan.tied, mesh)
        self._buffers: dict[str, torch.Tensor] = {}
        """Buffers that are saved."""
        for module in layout.modules:
            saved = module.state_dict(keep_vars=True)
            self._buffers |= {name: value for name, value in saved.items() if not isinstance(value, nn.Parameter)}
        self._metric_names: dict[type, tuple[str, ...]] = {}
        self._step, self._has_run = 0, False
        self._recorded: dict[Hashable, Recorded] = {}
        """The pass that generation ran last, at most one."""
        self._writing = 0
        """Blocks of :meth:`writing`, in which gathered weights stay."""
        self._gradients: GradientReducer | None = None
        if mesh.sizes.world_size > 1:
            self._gradients = GradientReducer(
                self._parameters.by_name,
                mesh,
                tensor_partial=layout.tensor_partial,
                data_reduced=layout.storage.sharded,
                overlapped=mesh.sizes.pp == 1,
            )
        # The ranks that hold what this one holds, if it is not the only one.
        group = mesh.group("dp_replicate" if layout.storage.sharded else "efsdp" if mesh.sizes.ep > 1 else "fsdp")
        broadcasts = profile_of(compute.device).broadcast_loads
        self.replicas = Replicas(group) if broadcasts and group is not None else None
        self._routers: RouterMetrics | None = None
        if layout.routers:
            self._routers = RouterMetrics(
                layout.routers, layout.modules, device=compute.device, dtype=compute.metrics_dtype
            )
        self._weights: CopiedMasters | None = None
        """Weights that modules compute with where they differ from the stored ones; FSDP2 gathers its own."""
        trained = [parameter for parameter in self._parameters.by_name.values() if parameter.requires_grad]
        if trained and layout.storage.copied:
            self._weights = CopiedMasters(layout.modules, trained, compute.hidden)
        self._products: CopiedMasters | None = None
        """Weights of matrix products in autocast's dtype, which training computes with."""
        if layout.storage.cast_once:
            multiplied = product_weights(self.module, layout.plan)
            masters = [p for name, p in self.module.named_parameters() if name in multiplied and p.requires_grad]
            if masters:
                self._products = CopiedMasters(layout.modules, masters, compute.sent)
        self._pipeline: PipelineRunner | None = None
        self._tied: list[TiedCopies] = []
        self._tied_group: dist.ProcessGroup | None = None
        if mesh.sizes.pp > 1:
            from nxdt_core.engine.pipeline.runner import PipelineRunner  # imports those of torch: one CPU-second

            stages = dict(zip(layout.numbers, layout.modules, strict=True))
            self._tied = tied_copies(stages, layout.plan, stage_count=mesh.sizes.stages)
            self._tied_group = tied_group(mesh) if self._tied else None
            self._pipeline = PipelineRunner(
                stages,
                mesh,
                micro_batches=layout.storage.micro_batches,
                hidden_shape=self._hidden_shape,
                hidden_dtype=compute.hidden,
                device=compute.device,
                forward_context=compute.autocast,
                sent=compute.sent,
                pooled=self.plan.experts.pooled,
            )

    def begin_step(self, step: int) -> None:
        """Set the number of the coming step in the run."""
        self._step = step

    def run_train(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Accumulate the gradients of the global batch's loss, one micro-batch on the device at a time."""
        with self._passing(micro_batches, objective, training=True) as batch:
            if self._pipeline is not None:
                self._pipeline.train(batch.micro_batches, batch.step_context, batch.loss)
            last = len(batch.micro_batches) - 1
            for index, on_host in enumerate(batch.micro_batches if self._pipeline is None else ()):
                if self._layout.storage.sharded and index in (0, last):  # between them nothing changes
                    begin_micro_batch(self._layout.modules, self._mesh, last=index == last)
                if self._gradients is not None and index == last:
                    self._gradients.begin_last_backward()
                moved = on_host.to(self._compute.device)
                step = batch.step_context(moved)
                with self._compute.autocast():
                    logits = [self.module(moved.input_ids, **moved.arguments(), step=step)]
                # Popped, and in one expression: a name would hold the logits, or the graph, longer than needed.
                batch.loss(logits.pop(), moved, step).backward()  # type: ignore[no-untyped-call]
        return batch.result(self._routers)

    def run_eval(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Return the loss without gradients, in evaluation mode."""
        with self._passing(micro_batches, objective, training=False) as batch:
            if self._pipeline is not None:
                self._pipeline.forward(batch.micro_batches, batch.step_context, batch.loss)
            else:
                for on_host in batch.micro_batches:
                    moved = on_host.to(self._compute.device)
                    step = batch.step_context(moved)
                    batch.loss(self._logits(moved, step), moved, step)
        return batch.result(self._routers)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` [batch, seq], in the run's compute dtype, without
        gradients.

        Collective; equal on all ranks that read the same samples.
        """
        for module in self._layout.modules:
            module.eval()
        length = input_ids.shape[1]
        filling = (0, -length % self._sequence_multiple)
        padded = functional.pad(input_ids, filling)  # no token sees a later one
        positions = functional.pad(torch.arange(length), filling).expand_as(padded) if filling[1] else None
        batch = shard_sequence(Batch(input_ids=padded, labels=padded, position_ids=positions), self._mesh)
        with self._forward_only():
            logits = unshard_sequence(self._whole_logits(batch), self._mesh)
        return logits[:, :length]

    def decoding(self, lengths: Sequence[int], columns: int) -> Decoding:
        """Return a pass for each further token.

        Raises:
            CacheUnsupported: ranks share sequences, positions change, or attention is of no form that is known.
        """
        if self._mesh.sizes.cp > 1:
            raise CacheUnsupported("context parallel ranks share each sequence")
        check_positions_stay(self._layout.modules, lengths, columns)
        slots = attention_slots(self._layout.modules, self.plan)
        sharded = self._layout.storage.sharded
        recorded = records_passes(self._mesh.sizes, sharded=sharded) and (self._writing > 0 or not sharded)
        if not (recorded and profile_of(self._compute.device).records):
            cache, multiple = KeyValueCache(slots, lengths, columns), self._sequence_multiple
            return CachedDecoding(cache=cache, last_logits=self._last_logits, multiple=multiple)
        step = StepContext()
        return RecordedDecoding(
            cache=KeyValueCache(slots, lengths, max(lengths)),
            last_logits=self._last_logits,
            multiple=self._sequence_multiple,
            columns=columns,
            logits=lambda batch: _whole(self._logits(batch, step), 0),
            passes=self._recorded_passes,
            device=self._compute.device,
            weights=self.module.parameters,
            recordings=self._recorded,
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep gathered weights within the block."""
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1
            if not self._writing:
                self._free_gathered()

    def forget_passes(self) -> None:
        """Drop what recordings refer to, such as process groups."""
        self._recorded.clear()

    @contextmanager
    def _recorded_passes(self) -> Iterator[None]:
        if self.module.training:
            self.module.eval()
        if self._weights is not None:
            self._weights.stay = True
        with self._forward_only(), hooks_off(self._layout.modules if self._layout.storage.sharded else ()):
            yield

    def _last_logits(self, batch: Batch, columns: int, cache: KeyValueCache) -> torch.Tensor:
        """The logits [rows, vocab] of the last of the first ``columns`` tokens, whose keys and values are kept."""
        if self.module.training:
            for module in self._layout.modules:
                module.eval()
        last, alone = columns - 1, self._mesh.group("world") is None
        trims = columns > 1 and not self._layout.sequence_parallel
        heads = last_rows_only(self._layout.modules, self.plan, last) if trims else nullcontext()
        eager = torch.compiler.set_stance("force_eager") if self._layout.compiled else nullcontext()
        with self._forward_only(inference=alone), cache.extended(columns), heads, eager:
            return self._whole_logits(batch, last)[:, 0]

    def _whole_logits(self, batch: Batch, index: int | None = None) -> torch.Tensor:
        """Return what :func:`_whole` returns of the logits of a batch."""
        if self._pipeline is None:
            return _whole(self._logits(batch.to(self._compute.device), StepContext()), index)
        outputs = self._pipeline.forward([batch], lambda _: StepContext(), lambda logits, *_: _whole(logits, index))
        return self._pipeline.broadcast_from_last(outputs[0] if outputs else None)

    def log_probs(self, micro_batches: Sequence[Batch], measure: TokenMeasure | None = None) -> list[torch.Tensor]:
        """Return the log-probabilities of the labels; see :class:`nxdt_core.protocols.parallel_model.ParallelModel`."""
        passing = TokenValues(measure)
        self.run_eval(micro_batches, passing)
        values = passing.values
        if self._pipeline is not None:
            of_last = iter(values)
            values = [self._pipeline.broadcast_from_last(next(of_last, None)) for _ in micro_batches]
        return [unshard_sequence(value, self._mesh) for value in values]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under their global names; a tied one under its owner's."""
        return iter(self._parameters.by_name.items())

    def state_dict(self) -> dict[str, torch.Tensor | LocalShard]:
        """Return the parameters and saved buffers; a tied one once, and of a padded one the real elements."""
        state: dict[str, torch.Tensor | LocalShard] = {}
        for name, parameter in self._parameters.by_name.items():
            padded = self.padded.get(name)
            state[name] = parameter.detach() if padded is None else unpadded_shard(parameter.detach(), padded)
        return state | self._buffers

    def load_state_dict(self, state: Mapping[str, torch.Tensor | LocalShard], *, strict: bool = True) -> None:
        """Copy ``state`` into the parameters: whole tensors in one process, else shards of this layout.

        Raises:
            WeightsDoNotFit: names or shapes differ (with ``strict=False``: shapes only).
        """
        target = self.state_dict()
        check_loadable(target, state, strict=strict)
        with torch.no_grad():
            for name, value in state.items():
                if name in target:
                    own, new = (v.tensor if isinstance(v, LocalShard) else local_of(v) for v in (target[name], value))
                    own.copy_(new)
        self.sync_tied_copies()

    def local_modules(self) -> Sequence[nn.Module]:
        """Return the modules of this rank: one a pipeline stage.

        Without a pipeline, a program may call the module and ``backward`` itself: the optimizer's ``clip_grad_norm``
        completes the sums of the gradients.
        """
        return self._layout.modules

    def finish_gradients(self) -> torch.Tensor:
        """Complete the gradients' sums over ranks, and return their norm."""
        if self._gradients is not None:
            self._gradients.reduce_all()
        if self._tied:
            sum_tied_gradients(self._tied, self._tied_group)
        return self._norm([parameter.grad for parameter in self._parameters.owned])

    def parameter_norm(self) -> torch.Tensor:
        """Return the 2-norm of all weights that the optimizer updates or leaves frozen; masters where there are
        some."""
        return self._norm(self._parameters.owned)

    def sync_tied_copies(self) -> None:
        """Let second copies of tied parameters follow, and drop gathered weights; called after an update and after a
        load."""
        if self._writing:
            self._free_gathered()
        with torch.no_grad():
            for owner, user in self._parameters.tied_pairs:
                local_of(user).copy_(local_of(owner))
                user.grad = None

    def _norm(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        compute = self._compute
        return global_norm(tensors, self._mesh.group("world"), device=compute.device, dtype=compute.metrics_dtype)

    @contextmanager
    def _passing(
        self, micro_batches: Sequence[Batch], objective: Objective, *, training: bool
    ) -> Iterator[GlobalBatch]:
        """Provide the global batch within what this layout needs around the passes of its micro-batches."""
        for module in self._layout.modules:
            module.train(training)
        mixed_parts = 0
        if training and self._mesh.size("token_shuffle") > 1:
            mixed_parts = self._mesh.size("tp") if self._layout.sequence_parallel else 1
        batch = GlobalBatch(
            micro_batches, objective, self._mesh, self._compute, self._metric_names, self._step, mixed_parts
        )
        with ExitStack() as around:
            if self._mesh.sizes.world_size > 1 and not (self._has_run or self._layout.compiled):
                around.enter_context(name_shape_errors(self._layout.modules, self._layout.plan, self._mesh.sizes))
            if not training:
                around.enter_context(self._forward_only())
            if self._routers is not None:
                around.enter_context(self._routers.counting())
            if training and self._compute.masters_rounded is not None:
                # A tied parameter's second copy has the owner's name. (Those that are frozen have no master.)
                owners = {owner: name for name, owner in self._parameters.by_name.items()}
                copies = [(owners[owner], user) for owner, user in self._parameters.tied_pairs]
                named = [pair for pair in (*self._parameters.by_name.items(), *copies) if pair[1].requires_grad]
                shards = [(p, name, shard_of(p, self.padded.get(name), matrix=False)) for name, p in named]
                around.enter_context(rounded_weights(shards, self._compute.masters_rounded, self._step))
            if training:
                around.enter_context(self._computed_weights())
            if training and self._products is not None:
                around.enter_context(self._products.in_place())
            yield batch
        self._has_run = True

    def _logits(self, batch: Batch, step: StepContext) -> torch.Tensor:
        with self._compute.autocast():
            logits: torch.Tensor = self.module(batch.input_ids, **batch.arguments(), step=step)
        return logits

    @property
    def _sequence_multiple(self) -> int:
        """Return the number that a sequence's length must be a multiple of."""
        sizes = self._mesh.sizes
        return (2 * sizes.cp if sizes.cp > 1 else 1) * (sizes.tp if self._layout.sequence_parallel else 1)

    def _hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of hidden states of ``batch`` between pipeline stages, on this rank."""
        assert self.plan.pipeline is not None
        rows, tokens = batch.input_ids.shape
        if self._layout.sequence_parallel:
            tokens //= self._mesh.sizes.tp
        return rows, tokens, self.plan.pipeline.hidden_size

    @contextmanager
    def _forward_only(self, *, inference: bool = False) -> Iterator[None]:
        """No gradients, and inference mode where it is asked for and possible. Where FSDP2 gathers weights or masters
        have copies, a caller's inference mode is left, since no backward can use what is made in it; and gathered
        weights are freed unless a text is being written, since the optimizer's update would not reach them.
        """
        gathered = self._layout.storage.sharded or self._weights is not None
        mode = torch.inference_mode(not gathered) if gathered or inference else nullcontext()
        with mode, torch.no_grad(), self._computed_weights():
            yield
        if not self._writing:
            self._free_gathered()

    def _computed_weights(self) -> AbstractContextManager[None]:
        """Return the context in which modules compute with weights that differ from the stored ones."""
        if self._weights is not None:
            return self._weights.in_place()
        if not self._layout.gathers:
            return nullcontext()
        return scaled_weights(self._layout.gathers, self._parameters.by_name, self._mesh.group("fsdp"))

    def _free_gathered(self) -> None:
        for module in self._layout.modules if self._layout.storage.sharded else ():
            for part in module.modules():
                if is_fsdp_module(part):
                    part.reshard()


def _whole(logits: torch.Tensor, index: int | None = None) -> torch.Tensor:
    """Return logits of the whole vocabulary, of all tokens or of one of each row, [rows, 1, vocab]; a collective over
    tensor parallel ranks where they are cut."""
    if index is not None and logits.shape[1] > 1:  # the heads may have computed that one alone
        logits = logits[:, index : index + 1]
    if not is_dtensor(logits):
        return logits
    whole: torch.Tensor = logits.full_tensor()
    return whole
