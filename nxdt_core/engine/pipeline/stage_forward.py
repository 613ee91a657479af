"""Forward through the pipeline without gradients: validation and generation, any number and shape of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.engine.pipeline.stream import MicroBatchStream
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

__all__ = ["StageLinks", "broadcast_from", "forward_stages"]

T = TypeVar("T")


@final
class StageLinks:
    """Messages between stages: receives that are started early, sends that are waited for at the end of a window."""

    def __init__(self, group: dist.ProcessGroup, rank_of_stage: Callable[[int], int]) -> None:
        self._group, self._rank_of_stage = group, rank_of_stage
        self._own_rank = dist.get_rank(group)
        self._local: dict[tuple[int, int], torch.Tensor] = {}
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(self, stage: int, index: int, make_buffer: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start to receive the input of ``stage`` for micro-batch ``index``; what is returned waits for it."""
        peer = self._rank_of_stage(stage - 1)
        if peer == self._own_rank:
            return lambda: self._local.pop((stage, index))
        buffer = make_buffer()
        work = dist.irecv(buffer, group=self._group, group_src=peer)
        assert work is not None

        def wait() -> torch.Tensor:
            work.wait()
            return buffer

        return wait

    def send(self, hidden: torch.Tensor, stage: int, index: int) -> None:
        """Pass the output of ``stage`` on."""
        peer = self._rank_of_stage(stage + 1)
        if peer == self._own_rank:
            self._local[stage + 1, index] = hidden
            return
        hidden = hidden.contiguous()
        work = dist.isend(hidden, group=self._group, group_dst=peer)
        assert work is not None
        self._sends.append((work, hidden))

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


def forward_stages(
    modules: Mapping[int, nn.Module],
    stream: MicroBatchStream,
    links: StageLinks,
    *,
    stages: int,
    window: int,
    forward_context: Callable[[], AbstractContextManager[Any]],
    consume: Callable[[torch.Tensor, Batch, StepContext], T],
) -> list[T]:
    """Run all micro-batches of ``stream`` through this rank's stages.

    A window of micro-batches goes through one stage before any goes through the rank's next: with one stage per rank a
    window is one micro-batch; with several it keeps the other ranks busy meanwhile. A window's receives are started
    before its sends, so that two ranks that send to each other do it in one order, as NCCL asks.

    Returns:
        What ``consume`` made of the last stage's outputs; empty on ranks without it.
    """
    results: list[T] = []
    top = max(modules)
    for begin in range(0, len(stream), window):
        indices = range(begin, min(begin + window, len(stream)))
        for stage, module in sorted(modules.items()):
            inputs = {i: links.receive(stage, i, partial(stream.buffer, i)) for i in indices if stage > 0}
            for index in indices:
                args, kwargs = stream.inputs(index, first=stage == 0)
                if stage > 0:
                    args = (inputs.pop(index)().to(stream.hidden_like(index)[1]),)
                with forward_context():
                    output = module(*args, **kwargs, step=stream[index][1])
                if stage < stages - 1:
                    links.send(output.to(stream.sent_like(index)[1]), stage, index)
                else:
                    results.append(consume(output, *stream[index]))
                if stage == top:
                    stream.drop(index)
        links.flush()
    return results


def broadcast_from(
    value: torch.Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Return the tensor of group rank ``source`` on all ranks of ``group``; the others give None. Its shape travels
    first."""
    header = [None if value is None else (value.shape, value.dtype)]
    dist.broadcast_object_list(header, group=group, group_src=source, device=device)
    assert header[0] is not None
    shape, dtype = header[0]
    result = torch.empty(shape, dtype=dtype, device=device) if value is None else value.detach().contiguous()
    dist.broadcast(result, group=group, group_src=source)
    return result
