"""The objective of reward models: the Bradley-Terry likelihood of a preference, from one score for each answer."""

from __future__ import annotations

import torch
from torch.nn import functional

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import SequenceShards, StepContext
from nxdt_plugin_preference.config import RewardConfig
from nxdt_plugin_preference.objectives import PAIR, SCORES, Pairs, answer_mask, check_paired, sums_by_answer


class Reward(Objective):
    """−log σ(score of the chosen answer − score of the rejected one − margin), a mean over pairs.

    An answer's score is the head's at its last token, as in transformers' sequence classifiers (Ouyang et al. 2022,
    arXiv:2203.02155; margins: Touvron et al. 2023, arXiv:2307.09288). Metrics: ``rewards/chosen``,
    ``rewards/rejected``, ``rewards/accuracies`` and ``rewards/margins``, where rewards are the scores.
    """

    traits = ObjectiveTraits(unit="pairs", rows_per_sample=PAIR, head="score")

    def __init__(self, config: RewardConfig) -> None:
        self._center = config.center_rewards_coefficient

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs.

        Raises:
            RowsNotPaired: the samples are not pairs.
        """
        check_paired("reward", batch)
        (counts,) = sums_by_answer(answer_mask(batch)[None], batch, SequenceShards())
        return Pairs.of(counts, counts).real.sum()

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """``logits`` are scores [rows, seq, 1]."""
        scores = logits[..., 0].to(torch.promote_types(logits.dtype, torch.float32))
        mask = answer_mask(batch).to(scores)
        margin = batch.values.get(SCORES, torch.zeros_like(mask)) * mask
        figures = torch.stack([scores * last_tokens(batch, step.sequences), mask, margin])
        found, counts, margins = sums_by_answer(figures, batch, step.sequences)
        rewards = Pairs.of(found, counts)
        ahead = rewards.chosen - rewards.rejected - Pairs.of(margins / counts.clamp(min=1), counts).chosen
        losses = -functional.logsigmoid(ahead) + self._center * (rewards.chosen + rewards.rejected) ** 2
        return ObjectiveOutput(
            loss_sum=(losses * rewards.real).sum() * step.sequences.share,
            weight=rewards.real.sum(),
            metrics=rewards.metrics("rewards", step.sequences, margins=True),
        )


def last_tokens(batch: Batch, shards: SequenceShards) -> torch.Tensor:
    """Return which tokens are the last of a prompt with its answer, bool [rows, seq].

    All others there have labels, so that their number is the last one's position. Collective where ranks share
    sequences.
    """
    labelled = batch.labels != IGNORE_INDEX
    (counts,) = sums_by_answer(labelled.float()[None], batch, shards).flatten(1, 2)  # [rows, documents]
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(labelled.shape[1], device=labelled.device)
    documents = batch.document_ids
    if documents is not None:
        counts = counts.gather(1, documents.clamp(min=0)).masked_fill(documents < 0, -1)
    last: torch.Tensor = ~labelled & (positions == counts)
    return last
