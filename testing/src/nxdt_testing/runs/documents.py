"""Documents for the contract of objectives, padded to a row each or packed into fewer, with logits by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import ObjectiveTraits

__all__ = ["Document", "documents", "in_rows"]

_PROMPT = 3
"""Tokens of each document that the loss is not on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What one row of a sample holds of a document; tensors [seq]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    reference_log_probs: torch.Tensor
    logits: torch.Tensor
    """[seq, vocab]"""

    def __len__(self) -> int:
        return len(self.input_ids)


def documents(
    traits: ObjectiveTraits, lengths: Sequence[int], *, vocabulary: int, seed: int = 0
) -> list[tuple[Document, ...]]:
    """Return a document for each of ``lengths``, of as many rows as a sample of the objective has."""
    numbers = torch.Generator().manual_seed(seed)
    rows = traits.rows_per_sample
    return [
        tuple(_document(length - row % 2, vocabulary, numbers, halves=rows == 1) for row in range(rows))
        for length in lengths
    ]


def in_rows(
    samples: Sequence[Sequence[tuple[Document, ...]]], length: int, traits: ObjectiveTraits
) -> tuple[Batch, torch.Tensor]:
    """Return a batch of samples, each with these documents one after the other, and logits [rows, seq, vocab].

    Rows are filled up to ``length``; a sample without documents is a blank one.
    """
    rows = [_row([each[row] for each in sample], length) for sample in samples for row in range(traits.rows_per_sample)]
    stacked = [torch.stack(tensors) for tensors in zip(*(row[:-1] for row in rows), strict=True)]
    ids, labels, weights, reference, numbers, places = stacked
    batch = Batch(
        input_ids=ids,
        labels=labels,
        loss_weights=weights,
        position_ids=places,
        document_ids=numbers,
        reference_log_probs=None if traits.reference is None else reference,
        rows_per_sample=traits.rows_per_sample,
    )
    vocabulary = max(row[-1].shape[1] for row in rows)
    return batch, torch.stack([row[-1].expand(-1, vocabulary) for row in rows])


def _document(length: int, vocabulary: int, numbers: torch.Generator, *, halves: bool) -> Document:
    ids = torch.randint(vocabulary, (length + 1,), generator=numbers)
    labels = ids[1:].clone()
    labels[-1] = IGNORE_INDEX
    weights = torch.ones(length)
    weights[:_PROMPT] = 0.0
    if halves:
        weights[_PROMPT] = 0.5
    return Document(
        input_ids=ids[:-1],
        labels=labels,
        loss_weights=weights,
        reference_log_probs=-3 * torch.rand(length, generator=numbers) * (labels != IGNORE_INDEX),
        logits=torch.randn(length, vocabulary, generator=numbers, dtype=torch.float64),
    )


def _row(parts: Sequence[Document], length: int) -> tuple[torch.Tensor, ...]:
    """Ids, labels, weights, reference, document numbers, positions and logits of one row."""
    vocabulary = parts[0].logits.shape[1] if parts else 1
    left = length - sum(map(len, parts))
    fill = torch.full((left,), 0)
    pieces = [
        (
            part.input_ids,
            part.labels,
            part.loss_weights,
            part.reference_log_probs,
            torch.full((len(part),), number),
            torch.arange(len(part)),
            part.logits,
        )
        for number, part in enumerate(parts)
    ]
    pieces.append(
        (
            fill,
            fill + IGNORE_INDEX,
            fill.float(),
            fill.float(),
            fill - 1,
            fill,
            torch.ones(left, vocabulary, dtype=torch.float64),
        )
    )
    return tuple(torch.cat(each) for each in zip(*pieces, strict=True))
