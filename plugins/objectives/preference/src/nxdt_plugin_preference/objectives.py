"""The objectives on pairs of a chosen and a rejected answer.

DPO is direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7), CPO contrastive preference
optimisation (Xu et al. 2024, arXiv:2401.08417, equation 5), ORPO odds-ratio preference optimisation (Hong et al. 2024,
arXiv:2403.07691, equations 6 and 7). :func:`pair_losses` has the other forms of the first two.

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
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import CpoConfig, DpoConfig, OrpoConfig
from nxdt_plugin_preference.errors import ReferenceMissing, RowsNotPaired

PAIR = 2
"""Rows of a sample."""
SCORES = "answer_scores"
"""Value of the tokens of an answer: its margin over the rejected one, or KTO's label, 1 or −1."""


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


def pair_losses(loss_type: str, margins: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the losses of pairs, [pairs], by TRL's names of their forms.

    ``hinge`` is SLiC's (Zhao et al. 2023, arXiv:2305.10425), ``ipo`` that of Azar et al. 2023 (arXiv:2310.12036,
    equation 17), ``robust`` that of Chowdhury et al. 2024 (arXiv:2403.00409); ``sigmoid`` with smoothing is
    conservative DPO (Mitchell 2023).

    Args:
        loss_type: ``sigmoid``, ``robust``, ``hinge`` or ``ipo``.
        margins: [pairs] β times the difference of the two figures; of ``ipo``, the difference less its target.
        smoothing: share of preferences that are wrong.
    """
    if loss_type == "ipo":
        return margins**2
    if loss_type == "hinge":
        return (1 - margins).relu()
    right, wrong = -functional.logsigmoid(margins), -functional.logsigmoid(-margins)
    if loss_type == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong if smoothing else right


def check_paired(objective: str, batch: Batch) -> None:
    """Let a batch of pairs pass.

    Raises:
        RowsNotPaired: its samples are something else, such as answers apart from each other.
    """
    scores = batch.values.get(SCORES)
    if batch.rows_per_sample != PAIR or (scores is not None and scores[::PAIR].any() and not scores[1::PAIR].any()):
        raise RowsNotPaired(objective=objective, rows=batch.rows_per_sample)


def answer_mask(batch: Batch) -> torch.Tensor:
    """float [rows, seq]: 1 where the label is a token of an answer."""
    labelled = batch.labels != IGNORE_INDEX
    return labelled.float() if batch.loss_weights is None else batch.loss_weights * labelled


def sums_by_answer(values: torch.Tensor, batch: Batch, shards: SequenceShards) -> torch.Tensor:
    """Return the sums of ``values`` [figures, rows, seq] over the tokens of each answer: [figures, samples, rows of a
    sample, documents].

    Of whole answers also where ranks share sequences; then collective.
    """
    figures, rows, seq = values.shape
    if batch.document_ids is None:
        partial = values.sum(dim=2, keepdim=True)
    else:
        documents = batch.document_ids.clamp(min=0).expand(figures, rows, seq)  # padding, −1, has no values
        partial = values.new_zeros(figures, rows, seq * shards.ranks).scatter_add(2, documents, values)
    return shards.total(partial).view(figures, batch.samples, batch.rows_per_sample, -1)


class Dpo(Objective):
    """−log σ(β (log-ratio of the chosen answer − log-ratio of the rejected one)), a mean over pairs, or another form.

    An answer's log-ratio is its log-probability less that under the reference. Rewards are β times the log-ratios.
    Metrics: ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies`` (share of pairs whose chosen answer has
    the greater reward), ``rewards/margins``, ``logps/chosen`` and ``logps/rejected``.
    """

    def __init__(self, config: DpoConfig) -> None:
        self._beta, self._loss_type, self._smoothing = config.kl_beta, config.loss_type, config.label_smoothing
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
        margins = rewards.chosen - rewards.rejected
        if self._loss_type == "ipo":
            per_token = Pairs.of(ratios / counts.clamp(min=1), counts)
            margins = per_token.chosen - per_token.rejected - 0.5 / self._beta
        losses = pair_losses(self._loss_type, margins, self._smoothing) * rewards.real
        return ObjectiveOutput(
            loss_sum=losses.sum() * step.sequences.share,
            weight=rewards.real.sum(),
            metrics={
                **rewards.metrics("rewards", step.sequences, margins=True),
                **Pairs.of(log_probs, counts).metrics("logps", step.sequences),
            },
        )


class _WithFineTuning(Objective):
    """A loss of two terms: a mean over pairs, and the chosen answers' cross-entropy, a mean over tokens."""

    traits = ObjectiveTraits(unit="pairs", rows_per_sample=PAIR)

    def __init__(self, name: str, *, averaged: bool, prompt_in_nll: bool, alpha: float = 1.0) -> None:
        """``averaged``: whether an answer's log-probability is the mean of its tokens'; ``alpha``: weight of the second
        term, which counts prompts too where ``prompt_in_nll``."""
        self._name, self._averaged, self._prompt_in_nll, self._alpha = name, averaged, prompt_in_nll, alpha

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the numbers of pairs, and of the tokens whose cross-entropy counts: [2].

        Raises:
            RowsNotPaired: the samples are not pairs.
        """
        check_paired(self._name, batch)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        return torch.stack([Pairs.of(counts, counts).real.sum(), self._nll_mask(batch).sum()])

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [rows, seq, vocab]."""
        mask, nll_mask, shards = answer_mask(batch), self._nll_mask(batch), step.sequences
        losses = cross_entropies(logits, batch.labels, step)
        sums, counts = sums_by_answer(torch.stack([-losses * mask, mask.to(losses)]), batch, shards)
        log_probs = Pairs.of(sums / counts.clamp(min=1) if self._averaged else sums, counts)
        of_pairs, rewards, more = self._of_pairs(log_probs)
        nll = (losses * nll_mask).sum()
        return ObjectiveOutput(
            loss_sum=torch.stack([(of_pairs * log_probs.real).sum() * shards.share, self._alpha * nll]),
            weight=torch.stack([log_probs.real.sum(), nll_mask.sum()]),
            metrics={
                **rewards.metrics("rewards", shards, margins=True),
                **log_probs.metrics("logps", shards),
                "nll_loss": torch.stack([torch.zeros_like(nll), nll]).detach(),
                **{name: (of.detach() * log_probs.real).sum() * shards.share for name, of in more.items()},
            },
        )

    def _of_pairs(self, log_probs: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        """Return the losses of pairs, the rewards of their answers, and further metrics, [pairs] each."""
        raise NotImplementedError

    def _nll_mask(self, batch: Batch) -> torch.Tensor:
        """float [rows, seq]: 1 on the tokens of chosen rows that the fine-tuning term counts."""
        counted = (batch.labels != IGNORE_INDEX).float() if self._prompt_in_nll else answer_mask(batch)
        chosen = torch.arange(len(counted), device=counted.device) % PAIR == 0
        return counted * chosen[:, None]


class Cpo(_WithFineTuning):
    """−log σ(β (log-probability of the chosen answer − that of the rejected one)), a mean over pairs, or another form,
    and ``cpo_alpha`` times the chosen answers' cross-entropy, a mean over tokens.

    ``ipo`` and ``simpo`` (Meng et al. 2024, arXiv:2405.14734) take means over an answer's tokens. Rewards are β times
    the log-probabilities. Metrics: those of DPO, and ``nll_loss``.
    """

    def __init__(self, config: CpoConfig) -> None:
        averaged = config.loss_type in ("ipo", "simpo")
        super().__init__("cpo", averaged=averaged, prompt_in_nll=False, alpha=config.cpo_alpha)
        self._config = config

    def _of_pairs(self, log_probs: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        config = self._config
        rewards = log_probs.scaled(config.beta)
        margins = rewards.chosen - rewards.rejected
        if config.loss_type == "simpo":
            margins = margins - config.simpo_gamma
        elif config.loss_type == "ipo":
            margins = log_probs.chosen - log_probs.rejected - 0.5 / config.beta
        return pair_losses(config.loss_type, margins, config.label_smoothing), rewards, {}


class Orpo(_WithFineTuning):
    """−β log σ(log odds ratio), a mean over pairs, and the chosen answers' cross-entropy, a mean over tokens.

    The odds of an answer are p / (1 − p), where log p is the mean log-probability of its tokens; rewards are β log p.
    Metrics: those of DPO, ``nll_loss``, ``log_odds_chosen`` and ``log_odds_ratio`` (its log σ).
    """

    def __init__(self, config: OrpoConfig) -> None:
        super().__init__("orpo", averaged=True, prompt_in_nll=config.prompt_in_nll)
        self._beta = config.beta

    def _of_pairs(self, log_probs: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        log_odds = _log_odds(log_probs.chosen) - _log_odds(log_probs.rejected)
        log_ratio = functional.logsigmoid(log_odds)
        more = {"log_odds_chosen": log_odds, "log_odds_ratio": log_ratio}
        return -self._beta * log_ratio, log_probs.scaled(self._beta), more


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
