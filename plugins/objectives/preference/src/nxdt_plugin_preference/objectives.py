"""The objectives on pairs of a chosen and a rejected answer.

DPO is direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7). ORPO is odds-ratio
preference optimisation (Hong et al. 2024, arXiv:2403.07691, equations 6 and 7).

Row 2i of a batch holds the chosen answer of a pair, row 2i + 1 the rejected one. Packed rows hold several; documents of
the same number belong together. ``loss_weights`` are 1 on the answers and 0 on the prompts, whose labels are kept: a
loss may want those too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import DpoConfig, OrpoConfig
from nxdt_plugin_preference.errors import ReferenceMissing, RowsNotPaired

PAIR = 2
"""Rows of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """A figure of each answer, by pair."""

    chosen: torch.Tensor
    """[pairs], some of which may be blank."""
    rejected: torch.Tensor
    real: torch.Tensor
    """[pairs]: 1 where both answers have tokens, 0 of blank ones."""

    @classmethod
    def of(cls, answers: torch.Tensor, counts: torch.Tensor) -> Pairs:
        """Return the pairs of ``answers`` and their numbers of tokens, both [samples, 2, documents]."""
        real = (counts > 0).all(dim=1).flatten().to(answers.dtype)
        return cls(chosen=answers[:, 0].flatten(), rejected=answers[:, 1].flatten(), real=real)

    def scaled(self, factor: float) -> Pairs:
        """``factor`` times the figures."""
        return Pairs(chosen=factor * self.chosen, rejected=factor * self.rejected, real=self.real)

    def metrics(self, kind: str, shards: SequenceShards, *, margins: bool = False) -> Mapping[str, torch.Tensor]:
        """Return the sums over pairs, on ranks that share sequences this rank's share of them."""
        found = {f"{kind}/chosen": self.chosen, f"{kind}/rejected": self.rejected}
        if margins:
            found[f"{kind}/accuracies"] = (self.chosen > self.rejected).to(self.chosen.dtype)
            found[f"{kind}/margins"] = self.chosen - self.rejected
        return {name: (values.detach() * self.real).sum() * shards.share for name, values in found.items()}


def check_paired(objective: str, batch: Batch) -> None:
    """Let a batch of pairs pass.

    Raises:
        RowsNotPaired: its samples are something else.
    """
    if batch.rows_per_sample != PAIR:
        raise RowsNotPaired(objective=objective, rows=batch.rows_per_sample)


def answer_mask(batch: Batch) -> torch.Tensor:
    """float [rows, seq]: 1 where the label is a token of an answer."""
    labelled = batch.labels != IGNORE_INDEX
    return labelled.float() if batch.loss_weights is None else batch.loss_weights * labelled


def sums_by_answer(values: torch.Tensor, batch: Batch, shards: SequenceShards) -> torch.Tensor:
    """Return the sums of ``values`` [figures, rows, seq] over the tokens of each answer: [figures, samples, 2,
    documents].

    Of whole answers also where ranks share sequences; then collective.
    """
    figures, rows, seq = values.shape
    if batch.document_ids is None:
        partial = values.sum(dim=2, keepdim=True)
    else:
        documents = batch.document_ids.clamp(min=0).expand(figures, rows, seq)  # padding, −1, has no values
        partial = values.new_zeros(figures, rows, seq * shards.ranks).scatter_add(2, documents, values)
    return shards.total(partial).view(figures, rows // PAIR, PAIR, -1)


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
