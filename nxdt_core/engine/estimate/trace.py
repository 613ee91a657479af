"""One micro-batch through a pipeline stage on the meta device: what it keeps, what it needs on the way, what it sends.

Measured rather than derived: the stage is the very module that would train, in its layout, so that recomputation,
sequence shards, gathered keys and a plugin's own operators count for what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from nxdt_core.engine.estimate.kernels import AcceleratorKernels
from nxdt_core.engine.estimate.live import LiveBytes, Phase, WireBytes
from nxdt_core.protocols.step_context import StepContext

__all__ = ["GradientUse", "MicroBatchTrace", "StageInput", "trace_micro_batch"]

GradientUse = Literal["accumulated", "fresh", "sharded"]
"""Use of a parameter's gradient in backward: added to an existing one, kept as the first one, or handed to a
reduction that leaves the whole one behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """One micro-batch; its tensors are meta tensors."""

    first: torch.Tensor
    """Token ids int64 [micro_batch, seq] of the first stage; of any other hidden states, in the dtype within stages."""
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    step: StepContext | None = None
    """None for a stage whose forward does not take it."""
    sent: torch.dtype | None = None
    """Of hidden states on their way between stages; None: as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTrace:
    """Sizes in bytes, of one rank."""

    kept: int
    """Held from forward to backward, the stage's output included, its input and the parameters not."""
    peak: Mapping[Phase, int]
    """What lives at the highest moment of forward and backward; the gradients of :data:`GradientUse` ``fresh`` only."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes sent in collectives, by mesh dimension."""


def trace_micro_batch(
    stage: nn.Module,
    given: StageInput,
    *,
    loss: Callable[[torch.Tensor], torch.Tensor] | None,
    holds_output: bool = True,
    gradients: GradientUse = "accumulated",
    masters: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    views: Iterable[torch.Tensor] = (),
    dimensions: Mapping[str, str] | None = None,
) -> MicroBatchTrace:
    """Run ``stage`` forward and backward on meta tensors.

    Args:
        stage: on the meta device, in its layout; its gradients are cleared afterwards.
        given: one micro-batch on the meta device.
        loss: from the logits to the scalar that backward starts from, on the last stage; None on others.
        holds_output: whether the output lives until backward is over, as stock pipeline stages have it.
        gradients: what becomes of them.
        masters: dtype of parameters that are kept apart from those of ``stage``, which get the gradients; None: those
            of ``stage`` keep them.
        autocast: dtype of matrix products under autocast.
        views: parameters that stand for views of others, see :class:`AcceleratorKernels`.
        dimensions: mesh dimension by name of its process group.
    """
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if gradients == "accumulated" else None
    first = given.first.detach()
    if first.is_floating_point():  # hidden states that another rank has sent
        first = first.to(given.sent or first.dtype).requires_grad_()
    before = [first, given.position_ids, given.document_ids, *stage.parameters(), *stage.buffers()]
    before += [parameter.grad for parameter in parameters]
    live = LiveBytes(tensor for tensor in before if tensor is not None)
    wire, kernels = WireBytes(dimensions or {}), AcceleratorKernels(autocast, views)
    with ExitStack() as stack:
        for parameter in parameters:
            taken = _gradient_hook(gradients, live, masters)
            stack.callback(parameter.register_post_accumulate_grad_hook(taken).remove)  # type: ignore[no-untyped-call]
        for mode in (kernels, live, wire):
            stack.enter_context(mode)
        named = {} if given.step is None else {"step": given.step}
        output = stage(first.to(given.first.dtype), given.position_ids, given.document_ids, **named)
        if loss is None and given.sent is not None:
            output = output.to(given.sent)
        kernels.end_forward()
        kept, live.phase = live.total, "workspace"
        held = [output] if holds_output else []
        if loss is not None:
            live.retag(output, "logits")
            live.phase = "logits"
            output.register_hook(lambda grad: live.enter("workspace"))
            output = loss(output)
        _backward(output)
        held.clear()
    for parameter in parameters:
        parameter.grad = None
    return MicroBatchTrace(kept=kept, peak=Counter(live.peak), sent=wire.sent)


def _backward(output: torch.Tensor) -> None:
    """What ``torch.autograd.backward`` calls in the end. That one a function mode handles, with itself switched off
    until it is over, so that what is recomputed would miss the accelerator's kernels."""
    grad = torch.empty_like(output)  # of a stage's output it comes from another rank, into a buffer like this one
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _gradient_hook(
    gradients: GradientUse, live: LiveBytes, masters: torch.dtype | None
) -> Callable[[torch.Tensor], None]:
    """What happens to a parameter that has just received its gradient."""
    of_masters: list[torch.Tensor] = []  # live until the hook is removed

    def hook(parameter: torch.Tensor) -> None:
        if gradients == "fresh" and parameter.grad is not None:
            if masters is not None:
                of_masters.append(parameter.grad.to(masters))
            live.retag(parameter.grad if masters is None else of_masters[-1], "gradients")
        if gradients == "sharded" or masters is not None:
            parameter.grad = None

    return hook
