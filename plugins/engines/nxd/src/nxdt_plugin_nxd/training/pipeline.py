"""This rank's pipeline stages under the library's schedules: hidden states travel, each rank reads its own batches.

The library fixes the number and the shape of micro-batches when its model is built, so there is one for each that
occurs. It divides each loss by their number, and leaves the sums of gradients to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.mesh import stages_of_rank
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd.layout.placement import MeshCoordinates
from nxdt_plugin_nxd.training.global_batch import ComputeContext
from nxdt_plugin_nxd.training.interleaved import InterleavedModel

__all__ = ["Pipeline"]

Consume = Callable[[Any, Batch, StepContext], torch.Tensor]
"""From the logits of a micro-batch to its loss, on the last stage."""
Contexts = Callable[[Batch], StepContext]
"""From a micro-batch on the device to what its passes depend on in addition."""


class Pipeline:
    """Runs micro-batches through the stages, together with the other pipeline ranks."""

    def __init__(self, modules: Sequence[nn.Module], place: MeshCoordinates, around: ComputeContext) -> None:
        """``modules``: this rank's stages, in their order."""
        self._sizes = sizes = place.sizes
        numbers = stages_of_rank(place.pp, sizes.pp, sizes.vpp, sizes.schedule)
        self._stages = {
            number: _Stage(module, around, last=number == sizes.stages - 1)
            for number, module in zip(numbers, modules, strict=True)
        }
        self._models: dict[tuple[object, ...], NxDPPModel] = {}

    def train(self, batches: Sequence[Batch], contexts: Contexts, loss: Consume, *, scale: float) -> None:
        """Run forward and backward of one step; ``scale`` multiplies each loss before backward."""
        count = len(batches)
        self._run(batches, contexts, lambda *of: loss(*of) * (count * scale), training=True)

    def forward(self, batches: Sequence[Batch], contexts: Contexts, consume: Consume) -> None:
        """Run forward alone and hand each micro-batch's logits to ``consume`` on the last stage."""
        self._run(batches, contexts, consume, training=False)

    def _run(self, batches: Sequence[Batch], contexts: Contexts, consume: Consume, *, training: bool) -> None:
        for stage in self._stages.values():
            stage.begin(batches, contexts, consume)
        model = self._model(len(batches), batches[0].input_ids.shape, training=training)
        ids = torch.cat([batch.input_ids for batch in batches])
        run = model.run_train if training else model.run_eval
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

    def __init__(self, module: nn.Module, around: ComputeContext, *, last: bool) -> None:
        super().__init__()
        self.module, self._around, self._device, self._last = module, around, around.device, last
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
        with self._around.computing():
            output = self.module(hidden, positions, batch.document_ids, step=step)
        return (output,) if self._last else output

    def loss(self, logits: Any, _: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next micro-batch."""
        assert self._consume is not None
        return self._consume(logits, *next(self._losses))
