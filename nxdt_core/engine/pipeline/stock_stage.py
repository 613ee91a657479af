"""Stock ``PipelineStage`` as the newest torch has it, on every version that is supported.

Each override does nothing on the newest torch, and says up to which version it is needed.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

__all__ = ["StockStage", "run_schedule"]

_REDUCES_LAST = hasattr(PipelineStage, "perform_reduce_grad")
"""Whether schedules call ``perform_reduce_grad`` at the end of a step. Those of 2.9 do not."""


class StockStage(PipelineStage):
    """A stage whose shapes are given and whose inputs require gradients."""

    def forward_one_chunk(self, fwd_chunk_id: int, *inputs: Any, **options: Any) -> Any:
        """Forward of one micro-batch, whose output stock keeps only if ``save_forward_output`` says so."""
        output = super().forward_one_chunk(fwd_chunk_id, *inputs, **options)
        if not _REDUCES_LAST and self.output_chunks:  # 2.9 keeps the logits of all micro-batches and concatenates them
            self.output_chunks[-1] = torch.empty(1)
        return output

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of a micro-batch's inputs, which require gradients (up to 2.11 stock sets that at the
        start)."""
        ops: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        for op in ops:
            op.tensor.requires_grad_(self.has_backward)
        return ops

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients at the end of a step. 2.9 does so in the last backward, and has no such call."""
        if _REDUCES_LAST:
            super().perform_reduce_grad(grad_scale_factor)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, after the last of which all that a step needs is done."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if last_backward and full_backward and not _REDUCES_LAST:
            self.perform_reduce_grad(1)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Return one of stock's kinds of backward. Up to 2.11 the pass for inputs alone takes nothing but tensors."""
        if backward_type == "input":
            tensors = [value for value in bwd_kwargs["input_values"] if isinstance(value, torch.Tensor)]
            bwd_kwargs = {**bwd_kwargs, "input_values": tensors}
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Check nothing: up to 2.11 stock compares token ids with the shape of this rank's hidden states."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Check nothing: up to 2.11 stock compares logits with the shape that is given for hidden states."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first sends and receives between neighbours, of one number each, which 2.12 replaced by a vote.

        Stages of one rank are neighbours as well under ``zbv``, and a rank cannot send to itself. 2.9 sends an int64
        where it receives a float32.
        """
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        between = [op for op in ops if op.group_peer != self.group_rank]
        for op in between:
            op.tensor = op.tensor.float()
        return between


def run_schedule(schedule: Any, targets: torch.Tensor, losses: list[torch.Tensor]) -> None:
    """Run one step of a stock schedule, which appends to ``losses`` and returns no outputs (2.9 cannot leave them)."""
    options = {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}
    schedule.step(target=targets, losses=losses, **options)
