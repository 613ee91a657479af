"""Answers in a batch: row 2i holds the chosen answer of a pair, row 2i + 1 the rejected one.

Packed rows hold several; documents of the same number belong together. ``loss_weights`` are 1 on the answers and 0
on the prompts, whose labels are kept: a loss may want those too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.step_context import SequenceShards
from nxdt_plugin_preference.errors import RowsNotPaired

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
