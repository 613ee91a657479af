"""``parallel_layers.save`` and ``load``: NxD Core's older checkpoints, in which each rank has its own file.

::

    DIR/tp_rank_TT_pp_rank_PP/checkpoint.pt                what a rank saved
    DIR/tp_rank_TT_pp_rank_PP_dp_rank_DD/checkpoint.pt     under master_dp_only=False
    DIR/tp_rank_TT_pp_rank_PP, ….tensors/tensor_<n>.pt     under save_xser, of NxD Core; read here, not written

Files are ``torch.save`` of tensors, numbers, text, lists and dictionaries, which NxD Core reads too, and they are read
without running anything that a pickle names. They can be loaded only in the layout of their save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from nxdt_core.checkpoint.collective import on_all_ranks
from nxdt_core.checkpoint.torch_file import TorchFileDamaged, TorchFileRefused, read_torch_file
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_core.system.regular_files import replacing
from nxdt_plugin_nxd_core.arguments import binds, reason_and_advice, refused
from nxdt_plugin_nxd_core.config import NxDConfig, required_config
from nxdt_plugin_nxd_core.errors import NotOfThisModel, RankFilesDoNotFit, RankFileUnreadable
from nxdt_plugin_nxd_core.layers import GQAQKVColumnParallelLinear
from nxdt_plugin_nxd_core.model import NxDModel
from nxdt_plugin_nxd_core.optimizer import NxDOptimizer

_RANK = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{2,})(?:_dp_rank_\d{2,})?")
_FILE = "checkpoint.pt"
_SAVED = (torch.Tensor, LocalShard, bool, int, float, str, bytes, type(None), torch.Size, torch.dtype)


@binds
def save(
    state_dict: Mapping[str, Any], save_dir: str, down_cast_bf16: bool = False, master_dp_only: bool = True
) -> None:
    """Write this rank's tensors to ``save_dir/tp_rank_TT_pp_rank_PP/checkpoint.pt``. Collective.

    Args:
        state_dict: tensors, such as ``{"model": model.state_dict()}``, numbers, text, and lists and dictionaries of
            them.
        down_cast_bf16: write float32 tensors as bfloat16.
        master_dp_only: write one file for all data parallel ranks, which combine their shards under ZeRO-1; False
            writes one for each.

    Raises:
        ArgumentMeansNothing: on all ranks: a value that is none of these.
        RankFilesDoNotFit: on all ranks: a file could not be written.
    """
    config = required_config("parallel_layers.save")
    path = Path(save_dir) / _name(config, master_dp_only) / _FILE

    def check() -> None:
        for where, value in tree_flatten_with_path(state_dict)[0]:
            if not isinstance(value, _SAVED):
                name = f"state_dict{keystr(where)}"
                raise refused("parallel_layers.save", name, type(value).__name__, "state_dict")

    on_all_ranks(config.engine.ranks, check, where=str(save_dir))
    writes = not (config.rank("dp") and master_dp_only)

    def on_the_host(value: Any) -> Any:
        """Return this rank's elements of a tensor; collective where data parallel ranks have shards of it."""
        if not isinstance(value, torch.Tensor | LocalShard):
            return value
        if master_dp_only and isinstance(value, DTensor):
            value = value.redistribute(placements=_tp_placements(value))
        local = local_shard_of(value).tensor.detach()
        if not writes:
            return None
        local = local.to(HOST, copy=True)  # torch.save writes all of the memory that a view belongs to
        return local.to(torch.bfloat16) if down_cast_bf16 and local.dtype == torch.float32 else local

    content = tree_map(on_the_host, state_dict)

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                torch.save(_in_nxd_names(content, config), file)
        except OSError as error:
            raise _unfit(path, "unwritable", error=error) from error

    on_all_ranks(config.engine.ranks, write if writes else lambda: None, where=str(save_dir))


@binds
def load(
    load_dir: str,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    sharded: bool = True,
    model: Any = None,
    strict: bool = True,
    master_dp_only: bool = True,
) -> dict[str, Any]:
    """Load this rank's file of :func:`save`, or of NxD Core in the same layout. Collective.

    Args:
        load_dir: the directory; with ``sharded=False`` a file of whole tensors.
        model_or_optimizer: what to load the values into; None returns them.
        model_key: of its values in the file; None where the file holds them alone.
        model: another name of ``model_or_optimizer``.
        strict: refuse a file that lacks parameters or has others.
        master_dp_only: as of :func:`save`.

    Returns:
        What else the file holds.

    Raises:
        RankFilesDoNotFit: on all ranks: the files are of another layout, or lack what is asked for.
        RankFileUnreadable: on all ranks: a file is damaged, or names code.
        WeightsDoNotFit: on all ranks: names or shapes differ.
    """
    call = "parallel_layers.load"
    config, source = required_config(call), Path(load_dir)
    target = model if model_or_optimizer is None else model_or_optimizer
    if target is not None and not isinstance(target, NxDModel | NxDOptimizer):
        raise NotOfThisModel(call=call, problem=f"model_or_optimizer is {type(target).__name__}, and must be one")
    if not sharded and not isinstance(target, NxDModel):
        raise refused(call, "sharded", False)
    content, values = dict[str, Any](), dict[str, Any]()

    def prepare() -> None:
        path = _path_of(config, source, master_dp_only) if sharded else source
        read = _read(path)
        if not isinstance(read, dict):
            reason = f"it holds a {type(read).__name__} instead of a dictionary"
            raise RankFileUnreadable(path=str(path), reason=reason)
        content.update(read)
        if target is None:
            return
        chosen: Any = content if model_key is None else content.get(model_key)
        if not isinstance(chosen, dict):
            raise _unfit(path, "no key", key=model_key, known=listing(sorted(map(str, content)), 8))
        if isinstance(target, NxDOptimizer):
            state, groups = chosen.get("state"), chosen.get("param_groups")
            named = isinstance(state, dict) and all("/" in str(key) for key in state)
            if not named or not isinstance(groups, list) or len(groups) != len(target.param_groups):
                raise _unfit(path, "no state")
            chosen = state
        for name, value in chosen.items():
            if not isinstance(value, torch.Tensor):
                reason = f"'{name}' is a {type(value).__name__}, not a tensor"
                raise RankFileUnreadable(path=str(path), reason=reason)
        if isinstance(target, NxDModel):
            values.update(_of_model(target, chosen, path, strict, master_dp_only) if sharded else chosen)
            return
        parameters = target.nxd_config.model.parallel.state_dict()
        for key, value in chosen.items() if master_dp_only else ():
            parameter = parameters.get(key.rpartition("/")[0])
            if parameter is not None and tuple(value.shape) == _region(parameter, True).shape:
                chosen[key] = value[local_shard_of(parameter).region.within(_region(parameter, True))]
        values.update(state=chosen, param_groups=groups)

    on_all_ranks(config.engine.ranks, prepare, where=str(source))
    if target is None:
        return content
    if isinstance(target, NxDOptimizer):
        target.load_state_dict(values)
    else:
        if strict and not sharded:  # other stages have the rest of the names
            local = target.parallel.state_dict()
            everywhere = {name for names in config.engine.ranks.all_gather_object([*local]) for name in names}
            if values.keys() - everywhere:
                raise WeightsDoNotFit(missing=[], extra=sorted(values.keys() - everywhere), shapes=[])
            values = {name: value for name, value in values.items() if name in local}
        target.load_state_dict(values, strict=strict)
    return {} if model_key is None else {key: value for key, value in content.items() if key != model_key}


def _name(config: NxDConfig, master_dp_only: bool) -> str:
    name = f"tp_rank_{config.rank('tp'):02d}_pp_rank_{config.rank('pp'):02d}"
    return name if master_dp_only else f"{name}_dp_rank_{config.rank('dp'):02d}"


def _path_of(config: NxDConfig, folder: Path, master_dp_only: bool) -> Path:
    """Return the file of this rank, or raise where there is none, or those of another layout."""
    ranks = [match for path in folder.glob("tp_rank_*") if (match := _RANK.fullmatch(path.name))]
    if not ranks:
        raise _unfit(folder, "none")
    ours = config["tensor_parallel_size"], config.stages
    theirs = tuple(1 + max(int(rank[at]) for rank in ranks) for at in (1, 2))
    if theirs != ours:
        raise _unfit(folder, "other layout", theirs=theirs, ours=ours)
    path = folder / _name(config, master_dp_only)
    if not path.exists():
        raise _unfit(folder, "other ranks", name=path.name, instead=not master_dp_only)
    return path / _FILE if path.is_dir() else path


def _unfit(path: Path, case: str, **details: object) -> NxdtError:
    problem, advice = reason_and_advice("rank files", case, **details)
    return RankFilesDoNotFit(path=str(path), problem=problem, advice=advice)


def _read(path: Path) -> Any:
    """Return what a file holds, with references replaced by the tensors of the folder ``….tensors`` next to it."""
    if not path.is_file():
        raise _unfit(path, "no file")
    try:  # of torch-xla's references only the numbers are used
        content = read_torch_file(path, [(SimpleNamespace, "torch_xla.utils.serialization.TensorReference")])
    except TorchFileRefused as refused:
        reason = f"it names {listing(refused.names, 4)}, which could run code"
        raise RankFileUnreadable(path=str(path), reason=reason) from None
    except TorchFileDamaged as damaged:
        raise RankFileUnreadable(path=str(path), reason=str(damaged)) from damaged

    def resolved(value: Any) -> Any:
        if not isinstance(value, SimpleNamespace):
            return value
        number = getattr(value, "tid", None)
        if type(number) is not int or number < 0:
            raise RankFileUnreadable(path=str(path), reason=f"it refers to the tensor {number!r}")
        file = path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt"
        tensor = _read(file) if file.is_file() else None
        if not isinstance(tensor, torch.Tensor):
            raise RankFileUnreadable(path=str(file), reason="it is missing, or holds no tensor")
        return tensor

    return tree_map(resolved, content)


def _tp_placements(tensor: DTensor) -> list[Any]:
    along = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return [placement if name.startswith("tp") else Replicate() for name, placement in along]


def _region(tensor: torch.Tensor | LocalShard, of_all_dp: bool) -> TensorSlice:
    """Return the region that a file holds: this rank's, or its tensor parallel rank's, which ZeRO may shard further."""
    if not of_all_dp or not isinstance(tensor, DTensor):
        return local_shard_of(tensor).region
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, _tp_placements(tensor))
    return TensorSlice(tuple(offsets), tuple(sizes))


def _of_model(
    model: NxDModel, values: dict[str, Any], path: Path, strict: bool, of_all_dp: bool
) -> Mapping[str, LocalShard]:
    """Return a file's values under the names of the layers here, with their places in the whole tensors."""
    # The values of grouped-query attention get the names of the layers here; see :func:`_in_nxd_names`.
    local, values = model.parallel.state_dict(), {str(key): value for key, value in values.items()}
    for (prefix, part), kind, letters in product(_fused(model), ("weight", "bias"), ("qkv", "q", "k", "v")):
        name, names = f"{prefix}.{kind}_{letters}", [f"{prefix}.{letter}.{kind}" for letter in letters]
        if name not in values or not local.keys() >= {*names}:
            continue
        if part.kv_size_multiplier > 1:
            raise _unfit(path, "copied heads", name=name)
        value, rows = values.pop(name), [_region(local[key], of_all_dp).shape[0] for key in names]
        if letters == "qkv" and len(value) != sum(rows):
            raise _unfit(path, "rows", rows=len(value), prefix=prefix, wanted=sum(rows))
        values |= zip(names, value.split(rows) if letters == "qkv" else [value], strict=True)
    regions = {name: _region(local[name], of_all_dp) for name in local.keys() & values.keys()}
    shapes = [
        f"{name}: {tuple(values[name].shape)} instead of {region.shape} on this rank"
        for name, region in regions.items()
        if tuple(values[name].shape) != region.shape
    ]
    missing = sorted(local.keys() - values.keys()) if strict else []
    extra = sorted(values.keys() - local.keys()) if strict else []
    if missing or extra or shapes:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
    return {name: LocalShard(values[name], tuple(local[name].shape), region) for name, region in regions.items()}


def _fused(model: NxDModel) -> Iterator[tuple[str, GQAQKVColumnParallelLinear]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, GQAQKVColumnParallelLinear))


def _in_nxd_names(state: Any, config: NxDConfig) -> Any:
    """Return ``state`` with the names that NxD Core has for the projections of grouped-query attention."""
    if config.model is None or not isinstance(state, Mapping):
        return state
    renamed = {key: _in_nxd_names(value, config) for key, value in state.items()}
    for (path, part), kind in product(_fused(config.model), ("weight", "bias")):
        names = [f"{path}.{letter}.{kind}" for letter in "qkv"]
        if part.kv_size_multiplier == 1 and all(name in renamed for name in names):
            renamed[f"{path}.{kind}_qkv"] = torch.cat([renamed.pop(name) for name in names])
    return renamed
