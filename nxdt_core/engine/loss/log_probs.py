"""Log-probabilities of a batch's labels: what forward alone gives, in any layout."""

from __future__ import annotations

import torch

from nxdt_core.models.loss.cross_entropy import log_probs
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import ObjectiveOutput
from nxdt_core.protocols.step_context import StepContext

__all__ = ["LabelLogProbs"]


class LabelLogProbs:
    """An objective without a loss, which keeps the log-probabilities of the labels as micro-batches pass by."""

    def __init__(self, config: object = None) -> None:
        del config
        self.kept: list[torch.Tensor] = []
        """Of each micro-batch that came by here, float [rows, seq / cp]; 0 where there is no label."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the weight of the tokens: nothing is divided by it."""
        return batch.weight()

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """Keep the log-probability of each label [micro_batch, seq] from ``logits`` [micro_batch, seq, vocab]."""
        self.kept.append(log_probs(logits, batch.labels, step).detach())
        return ObjectiveOutput(loss_sum=self.kept[-1].new_zeros(()), weight=self.weight(batch))
