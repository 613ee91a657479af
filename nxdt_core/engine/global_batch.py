"""One pass over a global batch: its weight, the losses of this rank's micro-batches, and their sums over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import copy_to_group, reduce_from_group
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.engine.context.apply import shard_sequence
from nxdt_core.engine.expert import RouterMetrics
from nxdt_core.engine.expert_dispatch import exchange_padding
from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.optim.rounding import masters_rounded
from nxdt_core.errors.models import LogitsAreSharded
from nxdt_core.models.loss import IN_CHUNKS, RowKernels, log_probs
from nxdt_core.models.random.dropout_masks import step_numbers
from nxdt_core.models.step_border import called_with_step
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, check_weight
from nxdt_core.protocols.parallel_model import StepLoss
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import SequenceShards, StepContext, VocabularyLoss


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
        self.vocabulary_loss: VocabularyLoss = partial(vocabulary_parallel_cross_entropies, kernels=rows)
        self.pins = pins
        self.precision = precision
        self.masters_rounded = masters_rounded(precision, seed)
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
        self._metric_names = metric_names
        self._objective = objective
        self._mesh = mesh
        self._compute = compute
        weights = self._global_weights(micro_batches)
        self.weight = weights[0]
        divisors = torch.where(weights > 0, weights, torch.ones_like(weights))
        self._divisors, self._tokens = divisors[:-1], divisors[-1]
        self._step, self._aux_loss_scale, self._mixed_parts = step, 1 / self._tokens, mixed_parts
        group = mesh.group("cp")
        self._sequences = SequenceShards() if group is None else _shards(group)
        self.micro_batches: list[Batch] = []
        """Micro-batches as the model receives them: this rank's part of every sequence."""
        self._losses: list[torch.Tensor] = []
        self._metrics: dict[str, list[torch.Tensor]] = {}
        row = mesh.rank("dp") * sum(batch.input_ids.shape[0] for batch in micro_batches)  # ranks hold equally many rows
        for batch in micro_batches:
            shard = shard_sequence(replace(batch, first_row=row), mesh)
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
            vocabulary_loss=self._compute.vocabulary_loss,
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
        local = {name: torch.stack(values).sum() for name, values in self._metrics.items()}
        names = self._agreed(tuple(local))
        counted = [] if routers is None else [routers.sums]
        if self._mesh.group("world") is None:
            loss, metrics = torch.stack(self._losses).sum(), local
        else:
            sums = torch.zeros(1 + len(names), dtype=self._compute.metrics_dtype, device=self._compute.device)
            if self._losses:
                sums += torch.stack([torch.stack(self._losses).sum(), *(local[name] for name in names)]).to(sums)
            sums, *counted = self._over_ranks(sums, *counted)
            loss, metrics = sums[0], dict(zip(names, sums[1:], strict=True))
        if routers is not None:
            metrics |= routers.metrics(counted[0])
        return StepLoss(loss=loss, weight=self.weight, metrics=metrics)

    def _over_ranks(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Sums over all ranks, in one call; tensor parallel ranks have the same."""
        together = torch.cat([tensor.flatten() for tensor in tensors])
        if self._mesh.rank("tp"):
            together.zero_()
        dist.all_reduce(together)
        parts = torch.split(together, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _agreed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the metrics, which only the last stage of a pipeline knows by itself."""
        kind = type(self._objective)
        if self._mesh.sizes.pp == 1:
            self._metric_names[kind] = names
        elif kind not in self._metric_names:
            of_ranks: list[tuple[str, ...]] = [()] * self._mesh.sizes.world_size
            dist.all_gather_object(of_ranks, names)
            self._metric_names[kind] = max(of_ranks, key=len)
        return self._metric_names[kind]

    def _global_weights(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the weights of the objective's terms, then the number of tokens, the divisor of auxiliary losses.

        Sums over all data parallel ranks, on the device; of the ranks that read the same samples, only one contributes.
        """
        # Computed from the host's copy of the batch, without waiting for a kernel.
        of_batches = [
            torch.cat([self._objective.weight(batch).reshape(-1), batch.tokens().reshape(1)]) for batch in micro_batches
        ]
        compute, on_host = self._compute, torch.stack(of_batches).sum(0)
        # Without pinned memory, a device may still read the host's copy after it is freed.
        weights = compute.pinned(on_host) if compute.pins else on_host
        weights = weights.to(compute.device, non_blocking=compute.pins)
        if self._mesh.group("world") is None:
            return weights
        if any(self._mesh.rank(dim) for dim in ("pp", "cp", "tp")):
            weights = torch.zeros_like(weights)
        dist.all_reduce(weights)
        return weights


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


def _shards(group: dist.ProcessGroup) -> SequenceShards:
    def total(partial: torch.Tensor) -> torch.Tensor:
        return copy_to_group(reduce_from_group(partial, group), group)

    return SequenceShards(ranks=group.size(), total=total)


class LabelLogProbs(Objective):
    """An objective without a loss, which keeps the log-probabilities of the labels as micro-batches pass by."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        """Log-probabilities of each micro-batch that passed by, float [rows, seq / cp]; 0 where there is no label."""

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """Keep the log-probability of each label [micro_batch, seq] from ``logits`` [micro_batch, seq, vocab]."""
        self.kept.append(log_probs(logits, batch.labels, step).detach())
        return ObjectiveOutput(loss_sum=self.kept[-1].new_zeros(()), weight=self.weight(batch))
