"""The part of a tensor that this rank holds: plain tensors whole, distributed ones by their box."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import is_dtensor, local_of, piece_of, placed_like
from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.piece import Piece, ShardInfo


def storable_piece(name: str, tensor: torch.Tensor | Piece) -> Piece:
    """Return this rank's piece of ``tensor``, called ``name`` in messages, of which a checkpoint can hold the bytes.

    Raises:
        TensorStateUnsupported: it has no plain bytes (sparse, quantised, complex, on the meta device, a subclass of
            Tensor, freed memory), or no place in the whole (:func:`nxdt_core.distributed.placement.piece_of`).
    """
    if not (is_dtensor(tensor) or isinstance(tensor, Piece)):
        _check_plain(name, tensor)
    piece = piece_of(tensor, name)
    _check_plain(name, piece.tensor)
    return piece


def list_pieces(
    section: str, tensors: Mapping[str, torch.Tensor | Piece], ties: Mapping[str, str] | None = None
) -> tuple[dict[str, Piece], dict[str, ShardInfo]]:
    """Return the pieces of ``tensors`` by name, and their listing, in which tied tensors name their owner.

    Args:
        section: of the checkpoint.
        tensors: by name.
        ties: name of a tied tensor → name of its owner. None compares addresses, which finds tensors that are the same
            memory; a device may give none, and then nothing is tied.

    Raises:
        TensorStateUnsupported: as of :func:`storable_piece`, or a tensor does not fit the owner that ``ties`` names.
    """
    pieces = {name: storable_piece(f"{section}/{name}", tensor) for name, tensor in tensors.items()}
    owners = _owners_by_address(pieces) if ties is None else ties
    shards: dict[str, ShardInfo] = {}
    for name, piece in pieces.items():
        owner = owners.get(name)
        if owner is not None and owner not in pieces:
            owner = None  # another rank has the owner, so this one writes its own copy
        if owner is not None and (pieces[owner].shape, pieces[owner].box) != (piece.shape, piece.box):
            raise TensorStateUnsupported(where=f"{section}/{name}", reason=f"it is tied to {owner} of another shape")
        shards[name] = ShardInfo(dtype=dtype_name(piece.tensor), shape=piece.shape, box=piece.box, same_as=owner)
    return pieces, shards


def empty_like(tensor: torch.Tensor | Piece, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | Piece:
    """Return a tensor of ``shape`` without values: laid out as ``tensor`` where that has the same shape, else whole."""
    if isinstance(tensor, Piece):
        if tensor.shape != shape:
            return torch.empty(shape, dtype=dtype, device=tensor.tensor.device)
        return Piece(torch.empty_like(tensor.tensor, dtype=dtype), shape, tensor.box)
    if not is_dtensor(tensor) or tuple(tensor.shape) != shape:
        return torch.empty(shape, dtype=dtype, device=tensor.device)
    local = torch.empty_like(local_of(tensor).detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return placed_like(local, tensor)


def filled_up(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``tensor`` and, up to ``rows``, further rows that are the mean of its rows."""
    mean = tensor.mean(0, keepdim=True, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - tensor.shape[0], *tensor.shape[1:])])


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a dtype without ``torch.``, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _owners_by_address(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Names of tensors that are the same memory as an earlier one → that one's name."""
    seen: dict[object, str] = {}
    owners: dict[str, str] = {}
    for name, piece in pieces.items():
        local = piece.tensor
        address = local.data_ptr() if local.numel() else 0
        if address == 0:  # also of every tensor of a lazy device, such as torch-xla's: equal zeros say nothing
            continue
        memory = (local.device, address, local.dtype, local.stride(), local.is_neg(), piece.shape, piece.box)
        owner = seen.setdefault(memory, name)
        if owner != name:
            owners[name] = owner
    return owners


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TensorStateUnsupported(where=name, reason=f"it is a {type(tensor).__qualname__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise TensorStateUnsupported(where=name, reason=f"it is {tensor.layout} on the device {tensor.device.type}")
    if profile_of(tensor.device).host and tensor.numel() and tensor.data_ptr() == 0:
        raise TensorStateUnsupported(where=name, reason="its memory was freed, or was never allocated")
    if dtype_name(tensor) not in ITEM_BYTES:
        raise TensorStateUnsupported(where=name, reason=f"its dtype is {tensor.dtype}")
