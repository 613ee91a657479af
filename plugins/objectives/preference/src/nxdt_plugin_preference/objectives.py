"""The objectives on pairs of a chosen and a rejected answer, and on answers without pairs.

DPO is direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7), CPO contrastive preference
optimisation (Xu et al. 2024, arXiv:2401.08417, equation 5), ORPO odds-ratio preference optimisation (Hong et al. 2024,
arXiv:2403.07691, equations 6 and 7). :func:`pair_losses` and :func:`reward_losses` have the other forms. A reward model
is trained by the Bradley-Terry likelihood of a preference, from one score for each answer.

Row 2i of a batch holds the chosen answer of a pair, row 2i + 1 the rejected one. Packed rows hold several; documents of
the same number belong together. ``loss_weights`` are 1 on the answers and 0 on the prompts, whose labels are kept: a
loss may want those too.

Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) takes answers without pairs. The rows of a
sample are a prompt with its answer, and the prompt with the answer of another record. The second gives an estimate of
the KL divergence from the reference, over the whole global batch, before the pass that trains on the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch.nn import functional

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import CpoConfig, DpoConfig, KtoConfig, OrpoConfig, RewardConfig, RewardLoss
from nxdt_plugin_preference.errors import LabelsNotRead, ReferenceMissing, RowsNotPaired

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
        figures = {f"{kind}/chosen": self.chosen, f"{kind}/rejected": self.rejected}
        if margins:
            figures[f"{kind}/accuracies"] = (self.chosen > self.rejected).to(self.chosen.dtype)
            figures[f"{kind}/margins"] = self.chosen - self.rejected
        return {name: (values.detach() * self.real).sum() * shards.share for name, values in figures.items()}


def pair_losses(loss_type: str, margins: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the losses of pairs, [pairs], that depend on a margin alone, by TRL's names of their forms.

    ``hinge`` is SLiC's (Zhao et al. 2023, arXiv:2305.10425), ``ipo`` that of Azar et al. 2023 (arXiv:2310.12036,
    equation 17), ``robust`` that of Chowdhury et al. 2024 (arXiv:2403.00409), ``exo_pair`` that of Ji et al. 2024
    (arXiv:2402.00856, equation 16); ``sigmoid`` with smoothing is conservative DPO (Mitchell 2023).

    Args:
        loss_type: name of the form.
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
    if loss_type == "exo_pair":
        share = margins.sigmoid()
        return share * (-right - math.log1p(-smoothing)) + (1 - share) * (-wrong - math.log(smoothing))
    return (1 - smoothing) * right + smoothing * wrong if smoothing else right


def reward_losses(loss_type: str, ratios: Pairs, beta: float, tau: float) -> torch.Tensor:
    """Return the losses of pairs, [pairs], in which the two rewards count separately, by TRL's names of their forms.

    ``nca_pair`` and its binary form ``bco_pair`` are from Chen et al. 2024 (arXiv:2402.05369) and Jung et al. 2024
    (arXiv:2404.04656), ``sppo_hard`` from Wu et al. 2024 (arXiv:2405.00675, equation 4.7), ``apo_zero`` and
    ``apo_down`` from D'Oosterlinck et al. 2024 (arXiv:2408.06266, equations 7 and 8), ``discopop`` from Lu et al. 2024
    (arXiv:2406.08414, equation 5).

    Args:
        loss_type: name of the form.
        ratios: log-ratios; rewards are β times them.
        beta: β.
        tau: temperature of ``discopop``.
    """
    if loss_type == "sppo_hard":
        return (ratios.chosen - 0.5 / beta) ** 2 + (ratios.rejected + 0.5 / beta) ** 2
    chosen, rejected = beta * ratios.chosen, beta * ratios.rejected
    if loss_type == "nca_pair":
        return -functional.logsigmoid(chosen) - (functional.logsigmoid(-chosen) + functional.logsigmoid(-rejected)) / 2
    if loss_type == "bco_pair":
        return -functional.logsigmoid(chosen) - functional.logsigmoid(-rejected)
    if loss_type == "apo_zero":
        return (-chosen).sigmoid() + rejected.sigmoid()
    if loss_type == "apo_down":
        return chosen.sigmoid() + (rejected - chosen).sigmoid()
    margins = chosen - rejected
    return torch.lerp(-functional.logsigmoid(margins), (-margins).exp(), (margins / tau).sigmoid())


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


class _PairObjective(Objective):
    """A mean over pairs of a loss of their log-probabilities, and with ``alpha`` the chosen answers' cross-entropy, a
    mean over tokens."""

    def __init__(
        self,
        name: str,
        *,
        averaged: bool = False,
        alpha: float | None = None,
        prompt_in_nll: bool = False,
        reference: Literal["before", "step"] | None = None,
    ) -> None:
        """``averaged``: whether an answer's log-probability is the mean of its tokens'; ``alpha``: weight of the second
        term, which counts prompts too where ``prompt_in_nll``."""
        self._name, self._averaged, self._prompt_in_nll, self._alpha = name, averaged, prompt_in_nll, alpha
        self.traits = ObjectiveTraits(unit="pairs", rows_per_sample=PAIR, reference=reference)

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs; with a second term, [2] with that of the tokens whose cross-entropy counts.

        Raises:
            RowsNotPaired: the samples are not pairs.
        """
        scores = batch.values.get(SCORES)
        unpaired = scores is not None and scores[::PAIR].any() and not scores[1::PAIR].any()
        if batch.rows_per_sample != PAIR or unpaired:
            raise RowsNotPaired(objective=self._name, rows=batch.rows_per_sample)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        pairs = Pairs.of(counts, counts).real.sum()
        return pairs if self._alpha is None else torch.stack([pairs, self._nll_mask(batch).sum()])

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [rows, seq, vocab].

        Raises:
            ReferenceMissing: the objective compares with a reference, and the batch has none.
        """
        mask, shards = answer_mask(batch), step.sequences
        losses = cross_entropies(logits, batch.labels, step)
        figures = [-losses * mask, mask.to(losses)]
        if self.traits.reference is not None:
            if batch.reference_log_probs is None:
                raise ReferenceMissing()
            # Ratios are taken a token: the difference of two long sums would lose digits.
            figures.append((-losses - batch.reference_log_probs) * mask)
        sums, counts, *ratios = sums_by_answer(torch.stack(figures), batch, shards)
        log_probs = Pairs.of(sums / counts.clamp(min=1) if self._averaged else sums, counts)
        per_token = Pairs.of(ratios[0] / counts.clamp(min=1), counts) if ratios else log_probs
        of_pairs, rewards, more = self._of_pairs(Pairs.of(ratios[0], counts) if ratios else log_probs, per_token)
        loss_sum, weight = (of_pairs * log_probs.real).sum() * shards.share, log_probs.real.sum()
        metrics = {
            **rewards.metrics("rewards", shards, margins=True),
            **log_probs.metrics("logps", shards),
            **{name: (of.detach() * log_probs.real).sum() * shards.share for name, of in more.items()},
        }
        if self._alpha is not None:
            nll_mask = self._nll_mask(batch)
            nll = (losses * nll_mask).sum()
            loss_sum = torch.stack([loss_sum, self._alpha * nll])
            weight = torch.stack([weight, nll_mask.sum()])
            metrics["nll_loss"] = torch.stack([torch.zeros_like(nll), nll]).detach()
        return ObjectiveOutput(loss_sum=loss_sum, weight=weight, metrics=metrics)

    def _of_pairs(self, figures: Pairs, per_token: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        """Return the losses of pairs, the rewards of their answers, and further metrics, [pairs] each.

        Args:
            figures: log-ratios where there is a reference, else log-probabilities.
            per_token: log-ratios divided by the number of the answer's tokens.
        """
        raise NotImplementedError

    def _nll_mask(self, batch: Batch) -> torch.Tensor:
        """float [rows, seq]: 1 on the tokens of chosen rows that the fine-tuning term counts."""
        counted = (batch.labels != IGNORE_INDEX).float() if self._prompt_in_nll else answer_mask(batch)
        chosen = torch.arange(len(counted), device=counted.device) % PAIR == 0
        return counted * chosen[:, None]


class Dpo(_PairObjective):
    """−log σ(β (log-ratio of the chosen answer − log-ratio of the rejected one)), a mean over pairs, or other forms.

    Of several forms, the loss is their weighted sum; the form ``sft`` is the chosen answers' cross-entropy, a mean over
    tokens. An answer's log-ratio is its log-probability less that under the reference. Rewards are β times the
    log-ratios. Metrics: ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies`` (share of pairs whose chosen
    answer has the greater reward), ``rewards/margins``, ``logps/chosen`` and ``logps/rejected``; with ``sft``
    ``nll_loss``.
    """

    def __init__(self, config: DpoConfig) -> None:
        self._config = config
        self._weights = dict(config.weighted())
        reference: Literal["before", "step"] = "before" if config.precompute_ref_log_probs else "step"
        super().__init__("dpo", alpha=self._weights.pop("sft", None), reference=reference)

    def _of_pairs(self, figures: Pairs, per_token: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        config = self._config
        rewards = figures.scaled(config.kl_beta)
        total = torch.zeros_like(rewards.chosen)
        for loss_type, weight in self._weights.items():
            if loss_type in get_args(RewardLoss):
                losses = reward_losses(loss_type, figures, config.kl_beta, config.discopop_tau)
            else:
                margins = rewards.chosen - rewards.rejected
                if loss_type == "ipo":
                    margins = per_token.chosen - per_token.rejected - 0.5 / config.kl_beta
                losses = pair_losses(loss_type, margins, config.label_smoothing)
            total = total + weight * losses
        return total, rewards, {}


class Cpo(_PairObjective):
    """−log σ(β (log-probability of the chosen answer − that of the rejected one)), a mean over pairs, or another form,
    and ``cpo_alpha`` times the chosen answers' cross-entropy, a mean over tokens.

    ``ipo`` and ``simpo`` (Meng et al. 2024, arXiv:2405.14734) take means over an answer's tokens. Rewards are β times
    the log-probabilities. Metrics: those of DPO, and ``nll_loss``.
    """

    def __init__(self, config: CpoConfig) -> None:
        averaged = config.loss_type in ("ipo", "simpo")
        super().__init__("cpo", averaged=averaged, alpha=config.cpo_alpha)
        self._config = config

    def _of_pairs(self, figures: Pairs, per_token: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        config = self._config
        rewards = figures.scaled(config.beta)
        margins = rewards.chosen - rewards.rejected
        if config.loss_type == "simpo":
            margins = margins - config.simpo_gamma
        elif config.loss_type == "ipo":
            margins = figures.chosen - figures.rejected - 0.5 / config.beta
        return pair_losses(config.loss_type, margins, config.label_smoothing), rewards, {}


class Orpo(_PairObjective):
    """−β log σ(log odds ratio), a mean over pairs, and the chosen answers' cross-entropy, a mean over tokens.

    The odds of an answer are p / (1 − p), where log p is the mean log-probability of its tokens; rewards are β log p.
    Metrics: those of DPO, ``nll_loss``, ``log_odds_chosen`` and ``log_odds_ratio`` (its log σ).
    """

    def __init__(self, config: OrpoConfig) -> None:
        super().__init__("orpo", averaged=True, alpha=1.0, prompt_in_nll=config.prompt_in_nll)
        self._beta = config.beta

    def _of_pairs(self, figures: Pairs, per_token: Pairs) -> tuple[torch.Tensor, Pairs, Mapping[str, torch.Tensor]]:
        log_odds = _log_odds(figures.chosen) - _log_odds(figures.rejected)
        log_ratio = functional.logsigmoid(log_odds)
        more = {"log_odds_chosen": log_odds, "log_odds_ratio": log_ratio}
        return -self._beta * log_ratio, figures.scaled(self._beta), more


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


class Reward(_PairObjective):
    """−log σ(score of the chosen answer − score of the rejected one − margin), a mean over pairs.

    An answer's score is the head's at its last token, as in transformers' sequence classifiers (Ouyang et al. 2022,
    arXiv:2203.02155; margins: Touvron et al. 2023, arXiv:2307.09288). Metrics: ``rewards/chosen``,
    ``rewards/rejected``, ``rewards/accuracies`` and ``rewards/margins``, where rewards are the scores.
    """

    def __init__(self, config: RewardConfig) -> None:
        super().__init__("reward")
        self.traits = replace(self.traits, head="score")
        self._center = config.center_rewards_coefficient

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` are scores [rows, seq, 1]."""
        scores = logits[..., 0].to(torch.promote_types(logits.dtype, torch.float32))
        mask = answer_mask(batch).to(scores)
        margin = batch.values.get(SCORES, torch.zeros_like(mask)) * mask
        # All tokens of a prompt with its answer but the last have labels: their number is the last one's position.
        labelled = batch.labels != IGNORE_INDEX
        (ends,) = sums_by_answer(labelled.float()[None], batch, step.sequences).flatten(1, 2)  # [rows, documents]
        positions = batch.position_ids
        if positions is None:
            positions = torch.arange(labelled.shape[1], device=labelled.device)
        documents = batch.document_ids
        if documents is not None:
            ends = ends.gather(1, documents.clamp(min=0)).masked_fill(documents < 0, -1)
        is_last = ~labelled & (positions == ends)
        sums, counts, margins = sums_by_answer(torch.stack([scores * is_last, mask, margin]), batch, step.sequences)
        rewards = Pairs.of(sums, counts)
        ahead = rewards.chosen - rewards.rejected - Pairs.of(margins / counts.clamp(min=1), counts).chosen
        losses = -functional.logsigmoid(ahead) + self._center * (rewards.chosen + rewards.rejected) ** 2
        return ObjectiveOutput(
            loss_sum=(losses * rewards.real).sum() * step.sequences.share,
            weight=rewards.real.sum(),
            metrics=rewards.metrics("rewards", step.sequences, margins=True),
        )


class Kto(Objective):
    """1 − σ(β (log-ratio − KL)) of a desirable answer, 1 − σ(β (KL − log-ratio)) of another, a mean over answers.

    An answer's log-ratio is its log-probability less that under the reference. KL is the mean log-ratio of the global
    batch's second rows, at least 0. Metrics: ``rewards/chosen`` and ``logps/chosen``, means over desirable answers,
    ``rewards/rejected`` and ``logps/rejected`` over the others, ``rewards/margins``, ``rewards/accuracies`` (share of
    answers whose log-ratio is on its label's side of the KL), and ``kl``.

    Args:
        config: β and the weights of both kinds.
        kl: the estimate of the global batch; :meth:`prepare` makes it.
    """

    def __init__(self, config: KtoConfig, kl: torch.Tensor | None = None) -> None:
        self._config, self._kl = config, kl
        reference: Literal["before", "step"] = "before" if config.precompute_ref_log_probs else "step"
        self.traits = ObjectiveTraits(
            unit="answers", rows_per_sample=PAIR, reference=reference, values=(SCORES,), loss_rows=1
        )

    def prepare(self, micro_batches: Sequence[Batch], model: ParallelModel) -> tuple[Kto, list[Batch]]:
        """Return the objective with the KL of the global batch, and the first rows. Collective.

        Raises:
            LabelsNotRead: the samples are not answers with labels.
        """
        if any(batch.rows_per_sample != PAIR for batch in micro_batches):
            raise LabelsNotRead()
        first_rows = [replace(batch.map(lambda rows: rows[::PAIR]), rows_per_sample=1) for batch in micro_batches]
        second_rows = [replace(batch.map(lambda rows: rows[1::PAIR]), rows_per_sample=1) for batch in micro_batches]
        return Kto(self._config, model.run_eval(second_rows, _MeanLogRatio()).loss.clamp(min=0)), first_rows

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the numbers of answers, of desirable and of undesirable ones: [3].

        Raises:
            LabelsNotRead: the samples are not answers with labels.
        """
        mask = answer_mask(batch)
        return _counts(sums_by_answer(torch.stack([mask, _scores(batch) * mask]), batch, SequenceShards()))

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` [rows, seq, vocab].

        Raises:
            LabelsNotRead: the samples are not answers with labels.
            ReferenceMissing: the batch has no reference.
        """
        config, mask = self._config, answer_mask(batch)
        log_probs, ratios = _log_ratios(logits, batch, step)
        figures = torch.stack([mask.to(log_probs), _scores(batch) * mask, log_probs, ratios])
        sums = sums_by_answer(figures, batch, step.sequences).flatten(1)  # [figures, answers]
        side, log_probs, ratios = sums[1].detach().sign(), sums[2], sums[3]
        kl = ratios.new_zeros(()) if self._kl is None else self._kl.to(ratios)
        weights = torch.where(side > 0, config.desirable_weight, config.undesirable_weight) * side.abs()
        ahead = side * (ratios - kl)
        losses = weights * torch.sigmoid(-config.beta * ahead)
        rewards, share, none = config.beta * ratios.detach(), step.sequences.share, ratios.new_zeros(())
        of_kinds = {"chosen": (side > 0).to(ratios), "rejected": (side < 0).to(ratios)}

        def summed(figure: torch.Tensor) -> dict[str, torch.Tensor]:
            """Return the sums over desirable answers, and over others, in the places of their numbers."""
            chosen, rejected = ((figure.detach() * kind).sum() * share for kind in of_kinds.values())
            return {"chosen": torch.stack([none, chosen, none]), "rejected": torch.stack([none, none, rejected])}

        of_rewards = summed(rewards)
        return ObjectiveOutput(
            loss_sum=torch.stack([losses.sum() * share, none, none]),
            weight=_counts(sums),
            metrics={
                **{f"rewards/{kind}": figure for kind, figure in of_rewards.items()},
                "rewards/margins": of_rewards["chosen"] - of_rewards["rejected"],
                "rewards/accuracies": (ahead.detach() > 0).to(ratios).sum() * share,
                **{f"logps/{kind}": figure for kind, figure in summed(log_probs).items()},
                "kl": kl * side.abs().sum() * share,
            },
        )


class _MeanLogRatio(Objective):
    """The mean log-ratio of answers, as a loss that is only evaluated."""

    traits = ObjectiveTraits(unit="answers")

    def weight(self, batch: Batch, shards: SequenceShards | None = None) -> torch.Tensor:
        answered: torch.Tensor = sums_by_answer(answer_mask(batch)[None], batch, shards or SequenceShards()) > 0
        return answered.sum().float()

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        _, ratios = _log_ratios(logits, batch, step)
        return ObjectiveOutput(loss_sum=ratios.sum(), weight=self.weight(batch, step.sequences))


def _scores(batch: Batch) -> torch.Tensor:
    if SCORES not in batch.values or batch.rows_per_sample != 1:
        raise LabelsNotRead()
    return batch.values[SCORES]


def _counts(sums: torch.Tensor) -> torch.Tensor:
    """Numbers of answers, of desirable and of undesirable ones, from sums of the mask and of the scores."""
    real, side = sums[0] > 0, sums[1].sign()
    return torch.stack([real.sum(), (side > 0).sum(), (side < 0).sum()]).to(sums)


def _log_ratios(logits: torch.Tensor, batch: Batch, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and log-ratios of the answers' tokens, [rows, seq]; 0 elsewhere."""
    if batch.reference_log_probs is None:
        raise ReferenceMissing(objective="kto")
    mask = answer_mask(batch)
    log_probs = -cross_entropies(logits, batch.labels, step)
    return log_probs * mask, (log_probs - batch.reference_log_probs) * mask
