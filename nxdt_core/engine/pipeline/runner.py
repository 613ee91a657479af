"""A rank's part of the pipeline: training under a stock schedule, and forward alone.

Forward alone is for validation and generation: any number and shape of micro-batches, without gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.pipeline.schedules import check_micro_batches, make_schedule
from nxdt_core.engine.pipeline.stage import MicroBatchStream, StepContexts, StreamedStage
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import rank_of_stage
from nxdt_core.protocols.step_context import StepContext

if TYPE_CHECKING:
    from nxdt_core.engine.pipeline.schedules import StockSchedule

T = TypeVar("T")


@final
class PipelineRunner:
    """Runs micro-batches through the stages of this rank; the other pipeline ranks do the same.

    All ranks of the ``pp`` group call the same methods with the same micro-batches: each reads ids, positions and
    documents itself, and only hidden states travel.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: ParallelMesh,
        *,
        micro_batches: int,
        hidden_shape: Callable[[Batch], tuple[int, ...]],
        hidden_dtype: torch.dtype,
        device: torch.device,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sent: torch.dtype | None = None,
        pooled: int = 0,
    ) -> None:
        """Check that the schedule can run; nothing is sent yet.

        Args:
            stages: modules of this rank by stage number (:func:`nxdt_core.protocols.mesh.stages_of_rank`), ascending;
                under FSDP2 the root of each is wrapped.
            mesh: its ``pp`` is above 1. FSDP2 gradients are reduced as its ``zero_stage`` says: up to 1 once after
                the last micro-batch, from 2 after each one's backward.
            micro_batches: of a training step; a step may have another number that the schedule allows.
            hidden_shape: returns the shape of the hidden states of a host micro-batch between stages, on this rank.
            hidden_dtype: their dtype within stages.
            device: on which the stages run.
            forward_context: entered around each stage's forward and around the loss (autocast).
            sent: dtype in which hidden states and their gradients travel; None: ``hidden_dtype``.
            pooled: see :attr:`nxdt_core.protocols.plan.ExpertPlan.pooled`.

        Raises:
            MicroBatchesDoNotFit: the schedule cannot be filled.
        """
        group = mesh.group("pp")
        assert group is not None, "one pipeline rank needs no runner"
        self._schedule, self._pp, self._group = mesh.sizes.schedule, mesh.sizes.pp, group
        check_micro_batches(self._schedule, pp=self._pp, micro_batches=micro_batches)
        self.stages, self._count = stages, self._pp * len(stages)
        self.holds_last = self._count - 1 in stages
        """Whether the model's last stage, which gives logits and losses, is on this rank."""
        self._zero_stage = mesh.sizes.zero_stage
        self._stream = MicroBatchStream(
            device, hidden_shape, hidden_dtype, sent or hidden_dtype, forward_context=forward_context, pooled=pooled
        )
        self._loss: Callable[[torch.Tensor, Batch, StepContext], torch.Tensor] | None = None
        self._prepared: tuple[tuple[int, tuple[int, ...]], list[StreamedStage], StockSchedule] | None = None

    def train(
        self,
        batches: Sequence[Batch],
        contexts: StepContexts,
        loss: Callable[[torch.Tensor, Batch, StepContext], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run forward and backward of one step; gradients accumulate in the parameters as if one process had all
        stages.

        Args:
            batches: on the host; each moves to the device when the rank's first stage takes it.
            contexts: return the argument ``step`` of every stage's forward, from a micro-batch on the device.
            loss: on the last stage, of logits, the micro-batch on the device and its context: its share of the global
                loss, divided by the global weight already.

        Returns:
            The losses in order, detached; empty on ranks without the last stage.

        Raises:
            MicroBatchesDoNotFit: the schedule cannot run so many.
        """
        check_micro_batches(self._schedule, pp=self._pp, micro_batches=len(batches))
        self._loss = loss
        losses: list[torch.Tensor] = []
        # Torch logs all operations of all ranks on every rank where one fails.
        stock_log = logging.getLogger("torch.distributed.pipelining.schedules")
        stock_log.addFilter(_below_error)
        try:
            with self._stream.of(batches, contexts):
                # Rebuilt where the number or shape of micro-batches changes (milliseconds).
                key = len(batches), self._stream.shape(0)
                if self._prepared is None or self._prepared[0] != key:
                    stages = [
                        StreamedStage(
                            module,
                            index,
                            self._count,
                            self._stream,
                            self._group,
                            zero_stage=self._zero_stage,
                            releases=index == max(self.stages) and not self.holds_last,
                            keeps_sends=self._schedule != "1f1b",
                        )
                        for index, module in self.stages.items()
                    ]
                    stock = make_schedule(
                        self._schedule,
                        stages,
                        len(batches),
                        self._loss_of_stage,
                        gather_at_start=self._zero_stage < 3,
                    )
                    self._prepared = key, stages, stock
                _, stages, stock = self._prepared
                options: dict[str, Any] = {}
                if "return_outputs" in signature(stock.step).parameters:  # 2.9 cannot leave them
                    options["return_outputs"] = False
                stock.step(target=torch.arange(len(batches)), losses=losses, **options)
                for stage in stages:
                    stage.finish_sends()
        except RuntimeError as error:
            # Stock wraps what a stage raises; errors that a user can fix, and lack of memory, must stay recognisable.
            if isinstance(error.__cause__, (NxdtError, torch.OutOfMemoryError)):
                raise error.__cause__ from None
            raise
        finally:
            stock_log.removeFilter(_below_error)
            self._loss = None
        return [value.detach() for value in losses]

    def forward(
        self,
        batches: Sequence[Batch],
        contexts: StepContexts,
        consume: Callable[[torch.Tensor, Batch, StepContext], T],
    ) -> list[T]:
        """Run forward without gradients through all stages: any number of micro-batches, each with its own shape.

        A window of micro-batches goes through one stage before any goes through the rank's next: with one stage per
        rank a window is one micro-batch; with several it keeps the other ranks busy meanwhile. A window's receives are
        started before its sends, so that two ranks that send to each other do it in one order, as NCCL asks.

        Args:
            batches: on the host.
            contexts: as for :meth:`train`.
            consume: called on the last stage with logits, the micro-batch on the device and its context; what it does
                not keep is freed.

        Returns:
            What ``consume`` returned, in order; empty on ranks without the last stage.
        """
        results: list[T] = []
        stream, group = self._stream, self._group
        window = self._pp if len(self.stages) > 1 else 1
        ranks = [rank_of_stage(stage, self._pp, self._schedule) for stage in range(self._count)]
        here = dist.get_rank(group)
        local: dict[tuple[int, int], torch.Tensor] = {}
        """Outputs of stages whose next stage is on this rank."""
        sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        with torch.no_grad(), stream.of(batches, contexts):
            for begin in range(0, len(batches), window):
                indices = range(begin, min(begin + window, len(batches)))
                for stage, module in self.stages.items():
                    received: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}
                    for index in indices if stage > 0 and ranks[stage - 1] != here else ():
                        buffer = stream.buffer(index)
                        received[index] = dist.irecv(buffer, group=group, group_src=ranks[stage - 1]), buffer
                    for index in indices:
                        batch, step = stream[index]
                        if stage == 0:
                            hidden = batch.input_ids
                        elif index in received:
                            work, hidden = received.pop(index)
                            assert work is not None
                            work.wait()
                        else:
                            hidden = local.pop((stage, index))
                        if stage > 0:
                            hidden = hidden.to(stream.hidden_dtype)
                        with stream.forward_context():
                            output = module(hidden, **stream.arguments(index), step=step)
                        if stage == self._count - 1:
                            results.append(consume(output, batch, step))
                        elif ranks[stage + 1] == here:
                            local[stage + 1, index] = output.to(stream.sent)
                        else:
                            sent = output.to(stream.sent).contiguous()
                            sends.append((dist.isend(sent, group=group, group_dst=ranks[stage + 1]), sent))
                        if stage == max(self.stages):
                            stream.on_device.pop(index, None)
                for work, _ in sends:
                    assert work is not None
                    work.wait()
                sends.clear()
        return results

    def broadcast_from_last(self, value: torch.Tensor | None) -> torch.Tensor:
        """Return the last stage's tensor, of any shape, on all pipeline ranks; the others pass None."""
        source, device = rank_of_stage(self._count - 1, self._pp, self._schedule), self._stream.device
        header = [None if value is None else (value.shape, value.dtype)]  # sent first
        dist.broadcast_object_list(header, group=self._group, group_src=source, device=device)
        assert header[0] is not None
        shape, dtype = header[0]
        result = torch.empty(shape, dtype=dtype, device=device) if value is None else value.detach().contiguous()
        dist.broadcast(result, group=self._group, group_src=source)
        return result

    def _loss_of_stage(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        index = int(target)
        with self._stream.forward_context():
            result = self._loss(logits, *self._stream[index])
        self._stream.on_device.pop(index, None)
        return result.clone()  # never a view: the stage cuts it from its graph after backward


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
