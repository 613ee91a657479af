"""What one rank brings to a save, and how it writes the part of it that it was given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import SECTIONS, state_name
from nxdt_core.checkpoint.format.shards import write_pieces
from nxdt_core.checkpoint.format.state_tree import encode_tree
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.pieces import list_pieces
from nxdt_core.protocols.parallel.piece import Held, Listing, Piece, Place

__all__ = ["Share", "encode_state", "prepare_share", "write_share"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank brings to a save."""

    pieces: Mapping[Place, Piece]
    listing: Listing
    state: bytes
    """JSON of the rank's state; its tensors are among the pieces."""


def prepare_share(
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    *,
    rank: int,
    ties: Mapping[str, str] | None = None,
) -> Share:
    """Check everything of this rank, before anything is written anywhere. The pieces are the tensors' own memory.

    ``ties``: as of :func:`nxdt_core.checkpoint.save_checkpoint`.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes.
    """
    state_tensors: dict[str, torch.Tensor] = {}
    encoded = encode_state(state, state_tensors, rank)
    pieces: dict[Place, Piece] = {}
    listing: dict[Place, Held] = {}
    for section, tensors in zip(SECTIONS, (model, optimizer, state_tensors), strict=True):
        own, held = list_pieces(section, tensors, ties if ties is None or tensors is model else {})
        pieces |= {(section, name): piece for name, piece in own.items()}
        listing |= {(section, name): each for name, each in held.items()}
    return Share(pieces, listing, encoded)


def encode_state(state: Mapping[str, Any], tensors: dict[str, torch.Tensor], rank: int) -> bytes:
    """Return the JSON of ``state``; its tensors are put into ``tensors`` under names that begin with the rank."""

    def put_tensor(at: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = f"rank-{rank:05d}{at}"
        tensors[name] = value
        return name

    return json.dumps(encode_tree(state, put_tensor=put_tensor), separators=(",", ":"), allow_nan=False).encode()


def write_share(writer: AttemptWriter, share: Share, mine: AbstractSet[Place], *, rank: int) -> dict[Place, TensorPart]:
    """Write this rank's state and the pieces that were assigned to it, and return the location of each piece."""
    parts: dict[Place, TensorPart] = {}
    for section in SECTIONS:
        chosen = {name: piece for (of, name), piece in share.pieces.items() if of == section and (of, name) in mine}
        parts |= {(section, name): part for name, part in write_pieces(writer, section, chosen, rank=rank).items()}
    with writer.file(state_name(rank)) as stream:
        stream.write(share.state)
    return parts
