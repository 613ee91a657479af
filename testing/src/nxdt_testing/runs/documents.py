"""Documents for the contract of objectives, padded to a row each or packed into fewer, with logits by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import ObjectiveTraits

__all__ = ["Document", "documents", "in_rows"]

Document = Mapping[str, torch.Tensor]
"""Part of a sample's row that belongs to one document: fields of a batch [seq], and ``logits`` [seq, vocab]."""
_PROMPT = 3
"""Tokens of each document that the loss is not on."""


def documents(
    traits: ObjectiveTraits, lengths: Sequence[int], *, vocabulary: int, seed: int = 0
) -> list[tuple[Document, ...]]:
    """Return a document for each of ``lengths``, of as many rows as the objective's call takes of a sample."""
    numbers = torch.Generator().manual_seed(seed)
    rows = _rows(traits)
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
    rows = [
        _row([logits_of_row[row] for logits_of_row in sample], length)
        for sample in samples
        for row in range(_rows(traits))
    ]
    logits = [row.pop("logits") for row in rows]
    fields: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if traits.reference is None:
        del fields["reference_log_probs"]
    values = dict.fromkeys(traits.values, fields["values"])
    del fields["values"]
    vocabulary = max(logits_of_row.shape[1] for logits_of_row in logits)
    batch = Batch(**fields, values=values, rows_per_sample=_rows(traits))
    return batch, torch.stack([logits_of_row.expand(-1, vocabulary) for logits_of_row in logits])


def _rows(traits: ObjectiveTraits) -> int:
    return traits.loss_rows or traits.rows_per_sample


def _document(length: int, vocabulary: int, numbers: torch.Generator, *, halves: bool) -> Document:
    ids = torch.randint(vocabulary, (length + 1,), generator=numbers)
    labels = ids[1:].clone()
    labels[-1] = IGNORE_INDEX
    weights = torch.ones(length)
    weights[:_PROMPT] = 0.0
    if halves:
        weights[_PROMPT] = 0.5
    return {
        "input_ids": ids[:-1],
        "labels": labels,
        "loss_weights": weights,
        "position_ids": torch.arange(length),
        "reference_log_probs": -3 * torch.rand(length, generator=numbers) * (labels != IGNORE_INDEX),
        "values": torch.full((length,), 1.0 - 2 * (length % 2)),
        "logits": torch.randn(length, vocabulary, generator=numbers, dtype=torch.float64),
    }


def _row(parts: Sequence[Document], length: int) -> dict[str, torch.Tensor]:
    """Return the fields of one row, and its logits."""
    fill = torch.zeros(length - sum(len(part["labels"]) for part in parts), dtype=torch.long)
    vocabulary = parts[0]["logits"].shape[1] if parts else 1
    padding = {
        "input_ids": fill,
        "labels": fill + IGNORE_INDEX,
        "loss_weights": fill.float(),
        "position_ids": fill,
        "reference_log_probs": fill.float(),
        "values": fill.float(),
        "document_ids": fill - 1,
        "logits": torch.ones(len(fill), vocabulary, dtype=torch.float64),
    }
    numbered = [{**part, "document_ids": torch.full_like(part["labels"], number)} for number, part in enumerate(parts)]
    return {name: torch.cat([part[name] for part in (*numbered, padding)]) for name in padding}
