"""Values of a rank's file: pieces of the model's parameters, under NxD Core's names and under ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nxdt_core.distributed.placement import piece_of
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.piece import Box, Piece
from nxdt_plugin_nxd_core.config import NxDConfig
from nxdt_plugin_nxd_core.errors import RankFilesDoNotFit, RankFileUnreadable
from nxdt_plugin_nxd_core.layers import GQAQKVColumnParallelLinear
from nxdt_plugin_nxd_core.model import NxDModel
from nxdt_plugin_nxd_core.optimizer import NxDOptimizer

__all__ = ["in_nxd_names", "in_our_names", "of_all_dp_ranks", "optimizer_state", "shards_of", "tensors_of"]


def of_all_dp_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return this tensor parallel rank's part of ``tensor``, which data parallel ranks may share out. Collective."""
    return tensor.redistribute(placements=_tp_placements(tensor)) if isinstance(tensor, DTensor) else tensor


def _tp_placements(tensor: DTensor) -> list[Any]:
    names = tensor.device_mesh.mesh_dim_names or ()
    return [
        placement if name.startswith("tp") else Replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    ]


def _tp_box(tensor: torch.Tensor) -> Box:
    """The box of this tensor parallel rank, which data parallel ranks may share out."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, _tp_placements(tensor))
    return Box(tuple(offsets), tuple(sizes))


def tensors_of(values: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the values.

    Raises:
        RankFileUnreadable: one is not a tensor.
    """
    other = next((name for name, value in values.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise RankFileUnreadable(path=str(path), reason=f"'{other}' is a {type(values[other]).__name__}, not a tensor")
    return dict(values)


def shards_of(
    model: NxDModel, values: Mapping[str, Any], *, strict: bool, of_all_dp: bool
) -> dict[str, torch.Tensor | Piece]:
    """Return the values as pieces of the parameters.

    Raises:
        WeightsDoNotFit: names or shapes differ.
    """
    own = model.parallel.state_dict()
    pieces = {name: piece_of(value, name) for name, value in own.items()}
    saved = {name: _saved_box(own[name], piece, of_all_dp) for name, piece in pieces.items()}
    shapes = [
        f"{name}: {tuple(values[name].shape)} instead of {saved[name].shape} on this rank"
        for name in pieces
        if name in values and tuple(values[name].shape) != saved[name].shape
    ]
    missing = sorted(own.keys() - values.keys()) if strict else []
    extra = sorted(values.keys() - own.keys()) if strict else []
    if missing or extra or shapes:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
    return {
        name: Piece(values[name][piece.box.within(saved[name])].to(piece.tensor.dtype), piece.shape, piece.box)
        for name, piece in pieces.items()
        if name in values
    }


def _saved_box(tensor: torch.Tensor | Piece, piece: Piece, of_all_dp: bool) -> Box:
    return _tp_box(tensor) if of_all_dp and isinstance(tensor, torch.Tensor) else piece.box


def _fused(model: NxDModel) -> Iterator[tuple[str, GQAQKVColumnParallelLinear]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, GQAQKVColumnParallelLinear))


def in_nxd_names(state: Any, config: NxDConfig) -> Any:
    """Return ``state`` with the names that NxD Core has for the projections of grouped-query attention."""
    if config.model is None or not isinstance(state, Mapping):
        return state
    made = {key: in_nxd_names(value, config) if isinstance(value, Mapping) else value for key, value in state.items()}
    for path, part in _fused(config.model):
        for kind in ("weight", "bias"):
            names = [f"{path}.{letter}.{kind}" for letter in "qkv"]
            if part.kv_size_multiplier == 1 and all(name in made for name in names):
                made[f"{path}.{kind}_qkv"] = torch.cat([made.pop(name) for name in names])
    return made


def in_our_names(values: Mapping[str, Any], model: NxDModel, path: Path, *, of_all_dp: bool) -> dict[str, torch.Tensor]:
    """Return the values under the names of the layers here; see :func:`in_nxd_names`."""
    made = {str(key): value for key, value in tensors_of(values, path).items()}
    for prefix, part in _fused(model):
        for kind in ("weight", "bias"):
            found = [f"{prefix}.{kind}_{name}" for name in ("qkv", "q", "k", "v") if f"{prefix}.{kind}_{name}" in made]
            if found and part.kv_size_multiplier > 1:
                problem = f"has '{found[0]}', and NxD Core orders copies of keys and values otherwise"
                advice = "Convert it with NxD Core's checkpoint converter, and load the result with sharded=False."
                raise RankFilesDoNotFit(path=str(path), problem=problem, advice=advice)
            held = [getattr(getattr(part, letter), kind) for letter in "qkv"]
            if not found or any(each is None for each in held):
                continue
            if f"{prefix}.{kind}_qkv" in made:
                rows = [_saved_box(each, piece_of(each), of_all_dp).shape[0] for each in held]
                parts = dict(zip("qkv", _split(made.pop(f"{prefix}.{kind}_qkv"), rows, prefix, path), strict=True))
            else:
                names = [letter for letter in "qkv" if f"{prefix}.{kind}_{letter}" in made]
                parts = {letter: made.pop(f"{prefix}.{kind}_{letter}") for letter in names}
            made |= {f"{prefix}.{letter}.{kind}": value for letter, value in parts.items()}
    return made


def _split(fused: torch.Tensor, rows: list[int], name: str, path: Path) -> list[torch.Tensor]:
    if len(fused) != sum(rows):
        problem = f"has {len(fused)} rows of '{name}', not {sum(rows)}"
        advice = "Give GQAQKVColumnParallelLinear the output_sizes of the save."
        raise RankFilesDoNotFit(path=str(path), problem=problem, advice=advice)
    return [*torch.split(fused, rows)]


def optimizer_state(
    optimizer: NxDOptimizer, values: Mapping[str, Any], path: Path, *, of_all_dp: bool
) -> dict[str, torch.Tensor | Piece]:
    """Return this rank's part of the state that an optimizer saved.

    Raises:
        RankFilesDoNotFit: another optimizer saved it, such as one of NxD Core.
    """
    state, groups = values.get("state"), values.get("param_groups")
    if (
        not isinstance(state, dict)
        or not all("/" in str(key) for key in state)
        or not isinstance(groups, list)
        or len(groups) != len(optimizer.param_groups)
    ):
        advice = "Load the weights alone: state of NxD Core's own optimizers has another form, which is not read."
        raise RankFilesDoNotFit(path=str(path), problem="has no state that this optimizer saved", advice=advice)
    parameters = optimizer.nxd_config.model.parallel.state_dict()
    found: dict[str, torch.Tensor | Piece] = {}
    for key, value in tensors_of(state, path).items():
        parameter = parameters.get(key.rpartition("/")[0])
        if of_all_dp and parameter is not None and tuple(value.shape) == _tp_box(parameter).shape:
            value = value[piece_of(parameter).box.within(_tp_box(parameter))]
        found[key] = value
    return found
