"""A foreign checkpoint's weights, straight into what the ranks of a run hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from nxdt_core.checkpoint.assignment import Listing
from nxdt_core.checkpoint.fitting import check_model
from nxdt_core.checkpoint.foreign import ForeignCheckpoint, open_foreign
from nxdt_core.checkpoint.pieces import piece_of
from nxdt_core.checkpoint.tensor_index import TensorEntry
from nxdt_core.checkpoint.together import together
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["load_foreign_into"]


def load_foreign_into(
    path: Path,
    builder: ModelBuilder,
    tensors: Mapping[str, torch.Tensor | Piece],
    *,
    ranks: RankAgreement | None = None,
) -> None:
    """Fill parameters in place, in any layout. A rank reads those that it holds a part of, one at a time.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        path: of a format in :data:`nxdt_core.checkpoint.foreign.FORMATS`.
        builder: of the whole model.
        tensors: of this rank by global name, DTensors or pieces where they are sharded.
        ranks: of the run; None for a process that is alone.

    Raises:
        ForeignFormatUnknown: nothing there is recognised.
        WeightsDoNotFit: its weights are not those of the model; nothing was read.
    """
    opened: list[tuple[ForeignCheckpoint, Listing]] = []

    def look() -> None:
        found = open_foreign(path)[1]
        opened.append((found, found.listing(builder, weights_only=True)))

    together(ranks, look, where=str(path))
    found, listing = opened[0]
    index = {
        name: TensorEntry(dtype=held.dtype, shape=held.shape)
        for (section, name), held in listing.items()
        if section == "model"
    }
    check_model(index, tensors, ranks)
    together(ranks, lambda: _fill(found, [name for name in index if name in tensors], tensors), where=str(path))


@torch.no_grad()
def _fill(found: ForeignCheckpoint, names: list[str], tensors: Mapping[str, torch.Tensor | Piece]) -> None:
    due = found.read([("model", name) for name in names])
    for name in names:
        piece = piece_of(name, tensors[name])
        piece.tensor.copy_(next(due)[piece.box.within(Box.whole(piece.shape))])
