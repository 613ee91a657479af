"""Wrong objectives, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_objective_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.objective_contract import ObjectiveContract
from torch.nn import functional

from nxdt_core.models.loss import cross_entropies
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(Objective):
    """The mean over documents of the mean loss of a document's tokens."""

    traits = ObjectiveTraits(unit="documents")

    def __init__(self, config=None):
        del config

    def weight(self, batch):
        return self.real(self.by_document(self.mask(batch), batch)).sum()

    def __call__(self, logits, batch):
        mask = self.mask(batch)
        losses = self.losses(logits, batch)
        sums, counts = (self.by_document(each, batch) for each in (losses * mask, mask.to(losses)))
        means, real = sums / counts.clamp(min=1), self.real(counts)
        loss = (self.of_document(means) * real).sum() * self.share()
        return ObjectiveOutput(loss_sum=loss, weight=real.sum(), metrics=self.metrics(loss, means))

    def mask(self, batch):
        return batch.loss_weights * (batch.labels != IGNORE_INDEX)

    def losses(self, logits, batch):
        return cross_entropies(logits, batch.labels)

    def by_document(self, values, batch):
        documents, ranks = batch.document_ids.clamp(min=0), step_of(None).sequences.ranks
        sums = values.new_zeros(len(values), values.shape[1] * ranks).scatter_add(1, documents, values)
        return self.total(sums)

    def real(self, counts):
        return (counts > 0).to(counts)

    def of_document(self, mean):
        return mean

    def total(self, sums):
        return step_of(None).sequences.total(sums)

    def share(self):
        return step_of(None).sequences.share

    def metrics(self, loss, means):
        return {"nll": loss.detach()}


InheritsNothing = mutant(type("InheritsNothing", (), {**vars(Right), "head_loss": None, "weight": Right.weight}))


@mutant
class DividesByItsWeight(Right):
    def __call__(self, logits, batch):
        output = super().__call__(logits, batch)
        return ObjectiveOutput(loss_sum=output.loss_sum / output.weight.clamp(min=1), weight=output.weight)


@mutant
class CountsRowsBefore(Right):
    def weight(self, batch):
        return torch.tensor(float(len(batch.labels)))


@mutant
class LearnsTheLastToken(Right):
    """Labels that are ignored count as token 0."""

    def mask(self, batch):
        return batch.loss_weights

    def losses(self, logits, batch):
        return cross_entropies(logits, batch.labels.clamp(min=0))


@mutant
class CountsBlankRows(Right):
    def real(self, counts):
        return torch.zeros_like(counts).index_fill(1, torch.zeros(1, dtype=torch.long), 1.0) + (counts > 0).to(
            counts
        ).index_fill(1, torch.zeros(1, dtype=torch.long), 0.0)

    def of_document(self, mean):
        return mean + 0.1


@mutant
class TakesARowForADocument(Right):
    def by_document(self, values, batch):
        return self.total(values.sum(1, keepdim=True))


@mutant
class KeepsTheGraph(Right):
    def metrics(self, loss, means):
        return {"nll": loss}


@mutant
class AveragesItsMetric(Right):
    def metrics(self, loss, means):
        return {"nll": means.detach().mean() * self.share()}


@mutant
class SumsInTheDtypeOfTheLogits(Right):
    def losses(self, logits, batch):
        return super().losses(logits, batch).to(logits.dtype)


@mutant
class TakesTheLogOfAProbability(Right):
    def of_document(self, mean):
        return -torch.exp(-mean).log()


@mutant
class TakesTheWholeVocabulary(Right):
    def losses(self, logits, batch):
        columns = logits.float() if logits.dtype == torch.bfloat16 else logits
        kept = batch.labels.clamp(min=0, max=columns.shape[-1] - 1)
        return functional.cross_entropy(columns.transpose(1, 2), kept, reduction="none")


@mutant
class AddsNoShardsUp(Right):
    def total(self, sums):
        return sums


@mutant
class ReportsTheWholeOnEachRank(Right):
    def share(self):
        return 1.0


@mutant
class KeepsTheFirstWeight(Right):
    first = None

    def weight(self, batch):
        self.first = super().weight(batch) if self.first is None else self.first
        return self.first


@mutant
class WritesIntoItsBatch(Right):
    """Scales the weights of tokens where they are, so that a second look at the batch finds others."""

    def mask(self, batch):
        return batch.loss_weights.mul_(0.5) * (batch.labels != IGNORE_INDEX)


@mutant
class ForgetsTheWeights(Right):
    """Divides the sum over all labels by the sum of their weights."""

    traits = ObjectiveTraits()

    def weight(self, batch):
        return batch.weight()

    def __call__(self, logits, batch):
        losses = self.losses(logits, batch) * self.learns(batch)
        return ObjectiveOutput(loss_sum=losses.sum(), weight=batch.weight())

    def learns(self, batch):
        return batch.labels != IGNORE_INDEX


@mutant
class TakesWeightsForAMask(ForgetsTheWeights):
    def learns(self, batch):
        return super().learns(batch) & (batch.loss_weights > 0)


def under_contract(cls):
    class Contract(ObjectiveContract):
        @pytest.fixture
        def factory(self):
            return cls

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
