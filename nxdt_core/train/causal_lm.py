"""Next-token prediction."""

from __future__ import annotations

import torch

from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import ObjectiveOutput
from nxdt_core.protocols.step_context import StepContext

__all__ = ["CausalLM"]


class CausalLM:
    """Cross-entropy between logits and the labels, which are shifted already; −100 is ignored."""

    def __init__(self, config: object = None) -> None:
        del config  # the objective has no options

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of loss tokens, or the sum of ``loss_weights`` over them."""
        return batch.weight()

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """Return the summed cross-entropy of ``logits`` [micro_batch, seq, vocab] and its weight."""
        loss_sum, weight = cross_entropy_sum(logits, batch.labels, batch.loss_weights, step)
        return ObjectiveOutput(loss_sum=loss_sum, weight=weight)
