"""The micro-batches of a step, on the device one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.step_context import StepContext

__all__ = ["ForwardArguments", "HiddenLike", "MicroBatchStream", "StepContexts"]

ForwardArguments = Callable[[Batch], Mapping[str, Any]]
"""Keyword arguments of a stage's forward from the micro-batch on the device: positions and documents."""

StepContexts = Callable[[Batch], StepContext]
"""From the micro-batch on the device to what its passes depend on in addition."""

HiddenLike = tuple[torch.Size | tuple[int, ...], torch.dtype]
"""Shape of the hidden states that travel between two stages for one micro-batch, on this rank, and the dtype that they
have within stages."""


@final
class MicroBatchStream:
    """Micro-batches that move to the device when a stage first asks for them, and go when the rank's last stage is
    done with their forward: what backward needs of them, the graph holds until that backward."""

    def __init__(
        self, device: torch.device, hidden_like: Callable[[Batch], HiddenLike], sent: torch.dtype | None = None
    ) -> None:
        """``sent``: dtype in which hidden states travel; None: as they are."""
        self.on_device: dict[int, tuple[Batch, StepContext]] = {}
        self._device, self._hidden_like, self._sent = device, hidden_like, sent
        self._host: Sequence[Batch] = ()
        self._arguments: ForwardArguments = lambda batch: {}
        self._context_of: StepContexts = lambda batch: StepContext()

    @contextmanager
    def of(self, batches: Sequence[Batch], arguments: ForwardArguments, contexts: StepContexts) -> Iterator[None]:
        """Serve ``batches`` within the block."""
        self._host, self._arguments, self._context_of = batches, arguments, contexts
        try:
            yield
        finally:
            self._host = ()
            self.on_device.clear()

    def __len__(self) -> int:
        """Return the number of micro-batches of the step."""
        return len(self._host)

    def __getitem__(self, index: int) -> tuple[Batch, StepContext]:
        """Micro-batch ``index`` on the device, and its context, the same for all stages and the loss."""
        if index not in self.on_device:
            batch = self._host[index].to(self._device)
            self.on_device[index] = batch, self._context_of(batch)
        return self.on_device[index]

    def inputs(self, index: int, *, first: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return what a stage's forward takes from outside the pipeline: token ids on the first stage, arguments on
        all."""
        batch, _ = self[index]
        return ((batch.input_ids,) if first else ()), dict(self._arguments(batch))

    def hidden_like(self, index: int) -> HiddenLike:
        """Return the hidden states between stages for micro-batch ``index``, as stages compute with them."""
        return self._hidden_like(self._host[index])

    def sent_like(self, index: int) -> HiddenLike:
        """Return the same as they travel."""
        shape, dtype = self.hidden_like(index)
        return shape, self._sent or dtype

    def buffer(self, index: int) -> torch.Tensor:
        """Return the memory into which those hidden states are received."""
        shape, dtype = self.sent_like(index)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def drop(self, index: int) -> None:
        """Release the memory of micro-batch ``index``."""
        self.on_device.pop(index, None)
