"""The objective on answers without pairs: Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

A sample has two rows: a prompt with its answer, and the prompt with the answer of another record. The second gives an
estimate of the KL divergence from the reference, over the whole global batch, before the pass that trains on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from nxdt_core.models.loss import cross_entropies
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import KtoConfig
from nxdt_plugin_preference.errors import LabelsNotRead, ReferenceMissing
from nxdt_plugin_preference.objectives import PAIR, SCORES, answer_mask, sums_by_answer


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
        own, others = ([_rows(batch, number) for batch in micro_batches] for number in range(PAIR))
        return Kto(self._config, model.run_eval(others, _MeanLogRatio()).loss.clamp(min=0)), own

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

    def weight(self, batch: Batch) -> torch.Tensor:
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        return _answers(counts)

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        _, ratios = _log_ratios(logits, batch, step)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, step.sequences)
        return ObjectiveOutput(loss_sum=ratios.sum(), weight=_answers(counts))


def _answers(counts: torch.Tensor) -> torch.Tensor:
    number: torch.Tensor = (counts > 0).sum().float()
    return number


def _rows(batch: Batch, number: int) -> Batch:
    return replace(batch.map(lambda tensor: tensor[number::PAIR]), rows_per_sample=1)


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
