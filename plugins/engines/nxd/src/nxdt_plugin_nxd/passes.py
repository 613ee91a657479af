"""Passes over a global batch: its weight, the losses of this rank's micro-batches, and their sums over all ranks.

The rank's pipeline stages run under the library's schedules: hidden states are sent, each rank reads its own batches.
The library fixes the number and the shape of micro-batches when its model is built, so there is one for each that
occurs. It divides each loss by their number, and leaves the sums of gradients to the caller.

Its interleaved schedule, messages and losses support several stages of a rank. Two parts do not (commit fbac349): a
manual partition has one stage on each rank (``pipeline/model.py``, 394 to 476 and 1140), and the schedule of forward
alone runs each rank's first one only (``pipeline/scheduler.py``, ``InferenceSchedule``). :class:`InterleavedModel` adds
both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed.pipeline import NxDPPModel
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from neuronx_distributed.pipeline.partition import PipelineIO
from neuronx_distributed.pipeline.scheduler import (
    ForwardPostprocessTask,
    ForwardPreprocessTask,
    ForwardStepTask,
    PipeSchedule,
)
from torch import nn

from nxdt_core.models.random.dropout import step_numbers
from nxdt_core.models.step_boundary import called_with_step
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import stages_of_rank
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.parallel_model import StepLoss
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd.layout import sharded_cross_entropies
from nxdt_plugin_nxd.translation import MeshCoordinates

Consume = Callable[[Any, Batch, StepContext], torch.Tensor]
"""Function from the logits of a micro-batch to its loss, on the last stage."""
Contexts = Callable[[Batch], StepContext]
"""Function from a micro-batch on the device to the further inputs of its passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeContext:
    """Values that the passes of a run share."""

    device: torch.device
    seed: int
    place: MeshCoordinates
    data_group: dist.ProcessGroup | None
    """Ranks that read different samples; None where there is one."""
    pipeline_group: dist.ProcessGroup | None
    ranks: RankAgreement
    dtype: torch.dtype | None = None
    """Dtype of matrix products; None: that of the parameters."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward and the loss; backward runs outside of it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)


class GlobalBatch:
    """This rank's micro-batches of one step, and what they add to the loss of all."""

    def __init__(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        compute: ComputeContext,
        step: int,
        metric_names: dict[type, tuple[str, ...]],
    ) -> None:
        """Sum the weight over the data parallel ranks; pipeline ranks read the same samples.

        ``micro_batches`` are on the host. Dropout depends on ``step``. Pipeline ranks agree once on ``metric_names``,
        by kind of objective.
        """
        self._objective, self._compute, self._step, self._metric_names = objective, compute, step, metric_names
        of_batches = [
            torch.cat([objective.weight(batch).reshape(-1), batch.tokens().reshape(1)]).float()
            for batch in micro_batches
        ]
        weights = torch.stack(of_batches).sum(0).to(compute.device)
        if compute.data_group is not None:
            dist.all_reduce(weights, group=compute.data_group)
        self.weight = weights[0]
        divisors = torch.where(weights > 0, weights, torch.ones_like(weights))
        self._divisors, self._tokens = divisors[:-1], divisors[-1]
        self.micro_batches: list[Batch] = []
        """With the numbers of their rows; ranks hold equally many, one after the other."""
        row = compute.place.dp * sum(batch.input_ids.shape[0] for batch in micro_batches)
        for batch in micro_batches:
            self.micro_batches.append(replace(batch, first_row=row))
            row += batch.input_ids.shape[0]
        self._losses: list[torch.Tensor] = []
        self._metrics: dict[str, list[torch.Tensor]] = {}

    def step_context(self, batch: Batch) -> StepContext:
        """Return what the passes of a micro-batch on the device depend on in addition to it."""
        return StepContext(
            numbers=step_numbers(self._compute.seed, self._step, batch),
            ids=batch.input_ids,
            padding=batch.padding_mask(),
            labels=batch.labels,
            # The library divides summed gradients by the data parallel ranks: those of auxiliary losses, too.
            aux_loss_scale=self._compute.place.sizes.dp / self._tokens,
            vocabulary_loss=sharded_cross_entropies,
        )

    def loss(self, logits: object, batch: Batch, step: StepContext) -> torch.Tensor:
        """Return the share of one micro-batch in the loss of the global batch."""
        with self._compute.autocast():
            output: ObjectiveOutput = called_with_step(self._objective, step, logits, batch)
        loss = self._mean(output.loss_sum)
        self._losses.append(loss.detach())
        for name, value in output.metrics.items():
            self._metrics.setdefault(name, []).append(self._mean(value.detach()))
        return loss

    def result(self) -> StepLoss:
        """Return loss and metrics of the global batch, equal on all ranks. Collective."""
        compute = self._compute
        totals = {name: torch.stack(values).sum() for name, values in self._metrics.items()}
        names, kind = tuple(totals), type(self._objective)
        if compute.pipeline_group is not None:  # only the last stage of a pipeline knows them by itself
            if kind not in self._metric_names:
                self._metric_names[kind] = max(compute.ranks.all_gather_object(names), key=len)
            names = self._metric_names[kind]
        sums = torch.zeros(1 + len(names), device=compute.device)
        if self._losses:
            sums += torch.stack([torch.stack(self._losses).sum(), *(totals[name] for name in names)]).to(sums)
        for group in (compute.pipeline_group, compute.data_group):  # ranks without the last stage add zeros
            if group is not None:
                dist.all_reduce(sums, group=group)
        metrics = dict(zip(names, sums[1:], strict=True))
        return StepLoss(loss=sums[0], weight=self.weight, metrics=metrics)

    def _mean(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the terms of ``sums``, each divided by its own weight, together."""
        return (sums.reshape(-1) / self._divisors[: sums.numel()]).sum()


class Pipeline:
    """Runs micro-batches through the stages, together with the other pipeline ranks."""

    def __init__(self, modules: Sequence[nn.Module], compute: ComputeContext) -> None:
        """``modules``: this rank's stages, in their order."""
        self._sizes = sizes = compute.place.sizes
        numbers = stages_of_rank(compute.place.pp, sizes.pp, sizes.vpp, sizes.schedule)
        self._stages = {
            number: _Stage(module, compute, last=number == sizes.stages - 1)
            for number, module in zip(numbers, modules, strict=True)
        }
        self._models: dict[tuple[object, ...], NxDPPModel] = {}

    def run(
        self, batches: Sequence[Batch], contexts: Contexts, consume: Consume, *, scale: float | None = None
    ) -> None:
        """Run forward and hand each micro-batch's logits to ``consume`` on the last stage; with ``scale`` also the
        backward of one step, of what it returns times that."""
        times = 1.0 if scale is None else len(batches) * scale
        for stage in self._stages.values():
            stage.begin(batches, contexts, consume if scale is None else lambda *of: consume(*of) * times)
        model = self._model(len(batches), batches[0].input_ids.shape, training=scale is not None)
        ids = torch.cat([batch.input_ids for batch in batches])
        run = model.run_eval if scale is None else model.run_train
        run(inputs=ids, labels=ids)

    def _model(self, count: int, shape: torch.Size, *, training: bool) -> NxDPPModel:
        key = (count, tuple(shape), training)
        if key not in self._models:
            stages = [self._stages.get(number) or nn.Identity() for number in range(self._sizes.stages)]
            kind = InterleavedModel if self._sizes.vpp > 1 else NxDPPModel
            self._models[key] = kind(
                stages,
                num_microbatches=count,
                virtual_pipeline_size=self._sizes.vpp,
                manual_pp_partition=True,
                manual_pp_stage_partition_fn=lambda layers, _: {layer: index for index, layer in enumerate(layers)},
                manual_pp_loss_fn=list(self._stages.values())[-1].loss,
                use_optimizer_wrapper=True,  # otherwise it sums gradients over data parallel ranks at once
                return_loss_on_cpu=False,
            )
        return self._models[key]


class _Stage(nn.Module):
    """A stage as the library calls it: with ids, or with what the stage before gave."""

    def __init__(self, module: nn.Module, compute: ComputeContext, *, last: bool) -> None:
        super().__init__()
        self.module, self._compute, self._device, self._last = module, compute, compute.device, last
        self._forward: Iterator[tuple[Batch, StepContext]] = iter(())
        self._losses: Iterator[tuple[Batch, StepContext]] = iter(())
        self._consume: Consume | None = None

    def begin(self, batches: Sequence[Batch], contexts: Contexts, consume: Consume) -> None:
        """Take the micro-batches of a pass, which the library runs in order."""
        on_device = (batch.to(self._device) for batch in batches)
        moved = [(batch, contexts(batch)) for batch in on_device]
        self._forward, self._losses, self._consume = iter(moved), iter(moved), consume

    def forward(self, received: Any) -> Any:
        """Return hidden states, or on the last stage the logits, as the only element of a tuple."""
        batch, step = next(self._forward)
        hidden = batch.input_ids if isinstance(received, list) else received
        positions = batch.position_ids  # those of a part of the sequence could not be counted
        if positions is None:
            positions = torch.arange(batch.input_ids.shape[1], device=self._device).expand_as(batch.input_ids)
        with self._compute.autocast():
            output = self.module(hidden, positions, batch.document_ids, step=step)
        return (output,) if self._last else output

    def loss(self, logits: Any, _: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch."""
        assert self._consume is not None
        return self._consume(logits, *next(self._losses))


class InterleavedModel(NxDPPModel):  # type: ignore[misc]  # the library has no types
    """Runs ``virtual_pipeline_size`` stages on each rank; stage s is on rank s modulo the number of ranks."""

    def _create_manual_partition(self, module: list[Any], partition_fn: Any) -> None:
        super()._create_manual_partition(module, partition_fn)  # the first stage of each rank
        stages = self.pipeline_parallel_size * self.virtual_pipeline_size
        local_stages = [self.get_current_stage(chunk) for chunk in range(self.virtual_pipeline_size)]
        self.local_stage_modules += [
            PipelineStageModule(layers=module, num_stages=stages, stage_index=stage, partition_fn=partition_fn)
            for stage in local_stages[1:]
        ]
        for stage in range(self.pipeline_parallel_size, stages):
            received = PipelineIO(name="hidden states", input_idx=0, output_idx=0, metadata=None, obj=[])
            self.stage_id_to_IO_input_names[stage] = OrderedDict({f"stage_{stage}_input": received})
        self.stage_id_to_input_count |= dict.fromkeys(local_stages, 1)
        self.stage_id_to_output_count |= dict.fromkeys(local_stages, 1)

    def create_schedule(self) -> None:
        """Make the schedules of training, where the ranks divide the micro-batches, and of forward alone."""
        place = self.pipeline_parallel_size, self.pipeline_parallel_rank
        if self.num_microbatches % self.pipeline_parallel_size == 0:
            super().create_schedule()
        self.eval_scheduler = _ForwardSchedule(self.num_microbatches, *place, chunks=self.virtual_pipeline_size)

    def _create_model_inputs_and_labels_iter(self, input_kwargs: Any) -> None:
        super()._create_model_inputs_and_labels_iter(input_kwargs)
        self.model_labels_iter[self.virtual_pipeline_size - 1] = self.model_labels_iter[0]


class _ForwardSchedule(PipeSchedule):  # type: ignore[misc]
    """Forward alone, one micro-batch after the other through all stages, for any number of them."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, chunks: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._chunks = chunks

    def steps(self) -> Iterator[list[Any]]:
        """Yield the tasks of each micro-batch in each stage of this rank."""
        for number in range(self.num_microbatches):
            for chunk in range(self._chunks):
                kinds = (ForwardPreprocessTask, ForwardStepTask, ForwardPostprocessTask)
                yield [kind(number, model_chunk=chunk) for kind in kinds]
