"""One pass over a global batch: its weight, the losses of this rank's micro-batches, and their sums over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nxdt_core.models.random.dropout import step_numbers
from nxdt_core.models.step_border import called_with_step
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.parallel_model import StepLoss
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd.layout.layers import sharded_cross_entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeContext:
    """Values that the passes of a run share."""

    device: torch.device
    seed: int
    data_ranks: int
    data_rank: int
    data_group: dist.ProcessGroup | None
    """Ranks that read different samples; None where there is one."""
    pipeline_group: dist.ProcessGroup | None
    ranks: RankAgreement
    autocast: torch.dtype | None = None

    def computing(self) -> AbstractContextManager[object]:
        """Surround forward and the loss, never backward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


class GlobalBatch:
    """This rank's micro-batches of one step, and what they add to the loss of all."""

    def __init__(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        around: ComputeContext,
        step: int,
        metric_names: dict[type, tuple[str, ...]],
    ) -> None:
        """Sum the weight over the data parallel ranks; pipeline ranks read the same samples.

        Args:
            micro_batches: on the host.
            objective: the loss.
            around: of the run.
            step: number of the step, which dropout depends on.
            metric_names: those of each kind of objective, which the pipeline ranks agree on once.
        """
        self._objective, self._around, self._step, self._metric_names = objective, around, step, metric_names
        own = [
            torch.cat([objective.weight(batch).reshape(-1), batch.tokens().reshape(1)]).float()
            for batch in micro_batches
        ]
        weights = torch.stack(own).sum(0).to(around.device)
        if around.data_group is not None:
            dist.all_reduce(weights, group=around.data_group)
        self.weight = weights[0]
        divisors = torch.where(weights > 0, weights, torch.ones_like(weights))
        self._divisors, self._tokens = divisors[:-1], divisors[-1]
        self.micro_batches = list(_numbered(micro_batches, around.data_rank))
        self._losses: list[torch.Tensor] = []
        self._metrics: dict[str, list[torch.Tensor]] = {}

    def step_context(self, batch: Batch) -> StepContext:
        """Return what the passes of a micro-batch on the device depend on in addition to it."""
        return StepContext(
            numbers=step_numbers(self._around.seed, self._step, batch),
            ids=batch.input_ids,
            padding=batch.padding_mask(),
            labels=batch.labels,
            # The library divides summed gradients by the data parallel ranks: those of auxiliary losses, too.
            aux_loss_scale=self._around.data_ranks / self._tokens,
            vocabulary_loss=sharded_cross_entropies,
        )

    def on_device(self) -> Iterator[Batch]:
        """Yield the micro-batches, each moved when it is asked for."""
        for batch in self.micro_batches:
            yield batch.to(self._around.device)

    def loss(self, logits: object, batch: Batch, step: StepContext) -> torch.Tensor:
        """Return the share of one micro-batch in the loss of the global batch."""
        with self._around.computing():
            output: ObjectiveOutput = called_with_step(self._objective, step, logits, batch)
        loss = self._mean(output.loss_sum)
        self._losses.append(loss.detach())
        for name, value in output.metrics.items():
            self._metrics.setdefault(name, []).append(self._mean(value.detach()))
        return loss

    def result(self) -> StepLoss:
        """Return loss and metrics of the global batch, equal on all ranks. Collective."""
        around = self._around
        own = {name: torch.stack(values).sum() for name, values in self._metrics.items()}
        names = self._agreed(tuple(own))
        sums = torch.zeros(1 + len(names), device=around.device)
        if self._losses:
            sums += torch.stack([torch.stack(self._losses).sum(), *(own[name] for name in names)]).to(sums)
        for group in (around.pipeline_group, around.data_group):  # ranks without the last stage add zeros
            if group is not None:
                dist.all_reduce(sums, group=group)
        metrics = dict(zip(names, sums[1:], strict=True))
        return StepLoss(loss=sums[0], weight=self.weight, metrics=metrics)

    def _mean(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the terms of ``sums``, each divided by its own weight, together."""
        return (sums.reshape(-1) / self._divisors[: sums.numel()]).sum()

    def _agreed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the metrics, which only the last stage of a pipeline knows by itself."""
        kind = type(self._objective)
        if self._around.pipeline_group is None:
            self._metric_names[kind] = names
        elif kind not in self._metric_names:
            self._metric_names[kind] = max(self._around.ranks.all_gather_object(names), key=len)
        return self._metric_names[kind]


def _numbered(batches: Sequence[Batch], data_rank: int) -> Iterator[Batch]:
    """Yield the micro-batches with the numbers of their rows; ranks hold equally many, one after the other."""
    row = data_rank * sum(batch.input_ids.shape[0] for batch in batches)
    for batch in batches:
        yield replace(batch, first_row=row)
        row += batch.input_ids.shape[0]
