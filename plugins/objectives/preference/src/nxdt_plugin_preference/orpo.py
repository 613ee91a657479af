"""Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, equations 6 and 7)."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import OrpoConfig
from nxdt_plugin_preference.pairs import PAIR, Pairs, answer_mask, check_paired, sums_by_answer


class Orpo:
    """−β log σ(log odds ratio), a mean over pairs, and the chosen answers' cross-entropy, a mean over tokens.

    The odds of an answer are p / (1 − p), where log p is the mean log-probability of its tokens; rewards are β log p.
    Metrics: those of DPO, ``nll_loss``, ``log_odds_chosen`` and ``log_odds_ratio`` (its log σ).
    """

    traits = ObjectiveTraits(unit="pairs", rows_per_sample=PAIR)

    def __init__(self, config: OrpoConfig) -> None:
        self._beta = config.beta
        self._prompt_in_nll = config.prompt_in_nll

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the numbers of pairs, and of the tokens whose cross-entropy counts: [2].

        Raises:
            RowsNotPaired: the samples are not pairs.
        """
        check_paired("orpo", batch)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        return torch.stack([Pairs.of(counts, counts).real.sum(), self._nll_mask(batch).sum()])

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [rows, seq, vocab]."""
        mask, nll_mask = answer_mask(batch), self._nll_mask(batch)
        losses = cross_entropies(logits, batch.labels, step)
        sums, counts = sums_by_answer(torch.stack([-losses * mask, mask.to(losses)]), batch, step.sequences)
        log_probs = Pairs.of(sums / counts.clamp(min=1), counts)
        log_odds = _log_odds(log_probs.chosen) - _log_odds(log_probs.rejected)
        log_ratio = functional.logsigmoid(log_odds)
        nll = (losses * nll_mask).sum()
        share = step.sequences.share
        odds_sum = -self._beta * (log_ratio * log_probs.real).sum() * share
        rewards = log_probs.scaled(self._beta)
        return ObjectiveOutput(
            loss_sum=torch.stack([odds_sum, nll]),
            weight=torch.stack([log_probs.real.sum(), nll_mask.sum()]),
            metrics={
                **rewards.metrics("rewards", step.sequences, margins=True),
                **log_probs.metrics("logps", step.sequences),
                "nll_loss": torch.stack([torch.zeros_like(nll), nll]).detach(),
                "log_odds_chosen": (log_odds.detach() * log_probs.real).sum() * share,
                "log_odds_ratio": (log_ratio.detach() * log_probs.real).sum() * share,
            },
        )

    def _nll_mask(self, batch: Batch) -> torch.Tensor:
        """float [rows, seq]: 1 on the tokens of chosen rows that the fine-tuning term counts."""
        counted = (batch.labels != IGNORE_INDEX).float() if self._prompt_in_nll else answer_mask(batch)
        chosen = torch.arange(len(counted), device=counted.device) % PAIR == 0
        return counted * chosen[:, None]


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """log(p / (1 − p)); where log p = 0, as of blank answers and of those that are certain, the largest finite one.

    1 − p is −expm1(log p) near 1, 1 − exp(log p) elsewhere (Mächler 2012, "Accurately computing log(1 − exp(−|a|))").
    """
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    near_one = log_p > -math.log(2)
    # Each branch gets arguments that it is finite on: the gradient of one not taken is multiplied by 0; 0 × ∞ is nan.
    near = torch.log(-torch.expm1(torch.where(near_one, log_p, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_p)))
    return log_p - torch.where(near_one, near, far)
