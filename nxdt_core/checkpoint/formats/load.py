"""The weights of another program's checkpoint, straight into what the ranks of a run hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from nxdt_core.checkpoint.collective import on_all_ranks
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.formats.installed import open_checkpoint
from nxdt_core.checkpoint.pieces import storable_piece
from nxdt_core.checkpoint.read.compatibility import check_model
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.format import CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.parallel.piece import Box, Listing, Piece
from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["load_format_into"]


def load_format_into(
    path: Path,
    builder: ModelBuilder,
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | Piece],
    *,
    ranks: RankAgreement | None = None,
) -> None:
    """Fill parameters in place, in any layout. A rank reads those that it holds a part of, one at a time.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        path: of an installed checkpoint format.
        builder: of the whole model.
        kernel: its plugins bring the formats.
        tensors: of this rank by global name, DTensors or pieces where they are sharded.
        ranks: of the run; None for a process that is alone.

    Raises:
        ForeignFormatUnknown: nothing there is recognised.
        WeightsDoNotFit: its weights are not those of the model; nothing was read.
    """
    opened: list[tuple[CheckpointReader, Listing]] = []

    def look() -> None:
        found = open_checkpoint(path, kernel)[1]
        opened.append((found, found.listing(builder, weights_only=True)))

    on_all_ranks(ranks, look, where=str(path))
    found, listing = opened[0]
    index = {
        name: TensorEntry(dtype=held.dtype, shape=held.shape)
        for (section, name), held in listing.items()
        if section == "model"
    }
    check_model(index, tensors, ranks)
    on_all_ranks(ranks, lambda: _fill(found, [name for name in index if name in tensors], tensors), where=str(path))


@torch.no_grad()
def _fill(found: CheckpointReader, names: list[str], tensors: Mapping[str, torch.Tensor | Piece]) -> None:
    due = found.read([("model", name) for name in names])
    for name in names:
        piece = storable_piece(name, tensors[name])
        piece.tensor.copy_(next(due)[piece.box.within(Box.whole(piece.shape))])
