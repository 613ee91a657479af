"""The one global batch that a run of the matrix repeats, so that the loss falls fast and wrong gradients show."""

from __future__ import annotations

import torch

from nxdt_core.protocols.batch import IGNORE_INDEX, Batch

VOCAB, SEQ, ROWS, MICRO_BATCHES = 64, 24, 3, 8
"""24 divides as 2 x CP x TP needs, and nothing else has 24 entries: no dimension of the model, nor the tokens of a
rank's part of a micro-batch (72, 36 or 18). So whole sequences are known by their shape."""

_SEED = 20


def global_batch(*, packed: bool, count: int = MICRO_BATCHES) -> list[Batch]:
    """Return ``count`` micro-batches [3, 24]. Loss tokens are unequal: from all of a micro-batch to none of one.
    Packed rows end in padding, none to eight positions of it."""
    random = torch.Generator().manual_seed(_SEED)
    return [_micro_batch(number, count, packed, random) for number in range(count)]


def share(batches: list[Batch], dp_rank: int, dp_size: int) -> list[Batch]:
    """The micro-batches of one data parallel rank: neighbours, so that ranks differ much in their loss tokens."""
    count = len(batches) // dp_size
    return batches[dp_rank * count : (dp_rank + 1) * count]


def _micro_batch(number: int, count: int, packed: bool, random: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=random)
    ignored = torch.rand(ROWS, SEQ, generator=random) < number / (count - 1)  # none of 0, all of the last
    if number == 1:
        ignored[0] = True  # a row without loss tokens beside one that is full of them
    labels = tokens[:, 1:].masked_fill(ignored, IGNORE_INDEX)
    position_ids = document_ids = None
    if packed:
        starts = torch.rand(ROWS, SEQ, generator=random) < 0.2
        starts[:, 0] = True
        padding = torch.arange(SEQ) >= SEQ - (4 * torch.arange(ROWS).unsqueeze(1) + number) % 9
        document_ids = (starts.long().cumsum(1) - 1).masked_fill(padding, -1)
        labels = labels.masked_fill(padding, IGNORE_INDEX)
        places = torch.arange(SEQ).expand(ROWS, SEQ)
        position_ids = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(input_ids=tokens[:, :-1], labels=labels, position_ids=position_ids, document_ids=document_ids)
