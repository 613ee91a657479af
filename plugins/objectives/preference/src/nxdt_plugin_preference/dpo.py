"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import DpoConfig
from nxdt_plugin_preference.errors import ReferenceMissing
from nxdt_plugin_preference.pairs import PAIR, Pairs, answer_mask, check_paired, sums_by_answer


class Dpo:
    """−log σ(β (log-ratio of the chosen answer − log-ratio of the rejected one)), a mean over pairs.

    An answer's log-ratio is its log-probability less that under the reference. Rewards are β times the log-ratios.
    Metrics: ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies`` (share of pairs whose chosen answer has
    the greater reward), ``rewards/margins``, ``logps/chosen`` and ``logps/rejected``.
    """

    def __init__(self, config: DpoConfig) -> None:
        self._beta = config.kl_beta
        reference: Literal["before", "step"] = "before" if config.precompute_ref_log_probs else "step"
        self.traits = ObjectiveTraits(unit="pairs", rows_per_sample=PAIR, reference=reference)

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs.

        Raises:
            RowsNotPaired: the samples are not pairs.
        """
        check_paired("dpo", batch)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        return Pairs.of(counts, counts).real.sum()

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [rows, seq, vocab].

        Raises:
            ReferenceMissing: the batch has no reference.
        """
        if batch.reference_log_probs is None:
            raise ReferenceMissing()
        mask = answer_mask(batch)
        log_probs = -cross_entropies(logits, batch.labels, step)
        # Ratios are taken a token: the difference of two long sums would lose digits.
        figures = torch.stack([log_probs * mask, (log_probs - batch.reference_log_probs) * mask, mask.to(log_probs)])
        log_probs, ratios, counts = sums_by_answer(figures, batch, step.sequences)
        rewards = Pairs.of(self._beta * ratios, counts)
        losses = -functional.logsigmoid(rewards.chosen - rewards.rejected) * rewards.real
        return ObjectiveOutput(
            loss_sum=losses.sum() * step.sequences.share,
            weight=rewards.real.sum(),
            metrics={
                **rewards.metrics("rewards", step.sequences, margins=True),
                **Pairs.of(log_probs, counts).metrics("logps", step.sequences),
            },
        )
