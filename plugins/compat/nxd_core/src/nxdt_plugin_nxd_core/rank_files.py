"""``parallel_layers.save`` and ``load``: NxD Core's older checkpoints, in which each rank has its own file.

::

    DIR/tp_rank_TT_pp_rank_PP/checkpoint.pt                what a rank saved
    DIR/tp_rank_TT_pp_rank_PP_dp_rank_DD/checkpoint.pt     under master_dp_only=False
    DIR/tp_rank_TT_pp_rank_PP, ….tensors/tensor_<n>.pt     under save_xser, of NxD Core; read here, not written

Files are ``torch.save`` of tensors, numbers, text, lists and dictionaries, which NxD Core reads too, and they are read
without running anything that a pickle names. They can be loaded only in the layout of their save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks
from nxdt_core.checkpoint.torch_file import TorchFileDamaged, TorchFileRefused, read_torch_file
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors.base import listing
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.piece import Piece
from nxdt_core.system.regular_files import replacing
from nxdt_plugin_nxd_core.arguments import binds, expect, refused
from nxdt_plugin_nxd_core.config import NxDConfig, current_config
from nxdt_plugin_nxd_core.errors import (
    ConfigNotMade,
    NotOfThisModel,
    RankFilesDoNotFit,
    RankFileUnreadable,
)
from nxdt_plugin_nxd_core.model import NxDModel
from nxdt_plugin_nxd_core.optimizer import NxDOptimizer
from nxdt_plugin_nxd_core.rank_values import (
    in_nxd_names,
    in_our_names,
    of_all_dp_ranks,
    optimizer_state,
    shards_of,
    tensors_of,
)

__all__ = ["load", "save"]


_RANK = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{2,})(?:_dp_rank_(\d{2,}))?")
_FILE = "checkpoint.pt"
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype)


@binds(save_serially="all ranks write their files at the same time", save_xser="one file per rank holds its tensors")
def save(
    state_dict: Mapping[str, Any],
    save_dir: str,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Write this rank's tensors to ``save_dir/tp_rank_TT_pp_rank_PP/checkpoint.pt``. Collective.

    Args:
        state_dict: tensors, such as ``{"model": model.state_dict()}``, numbers, text, and lists and dictionaries of
            them.
        save_dir: a directory.
        save_serially, save_xser: no effect: each rank writes one file, all at the same time.
        down_cast_bf16: write float32 tensors as bfloat16.
        master_dp_only: write one file for all data parallel ranks, which combine their shards under ZeRO-1; False
            writes one for each.

    Raises:
        ArgumentMeansNothing: on all ranks: a value that is none of these.
        RankFilesDoNotFit: on all ranks: a file could not be written.
    """
    config = _config("parallel_layers.save")
    expect("parallel_layers.save", "state_dict", state_dict, "a dictionary", when=isinstance(state_dict, Mapping))
    expect("parallel_layers.save", "save_dir", save_dir, "a path", when=isinstance(save_dir, str | os.PathLike))

    path = Path(save_dir) / _name(config, master_dp_only) / _FILE
    on_all_ranks(config.engine.ranks, lambda: _check(state_dict, "state_dict"), where=str(save_dir))
    writes = not (config.groups.rank("dp") and master_dp_only)
    held = _held(state_dict, of_all_dp=master_dp_only, down_cast=down_cast_bf16, keeps=writes)

    def write() -> None:
        if not writes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                torch.save(in_nxd_names(held, config), file)
        except OSError as error:
            advice = "Free space there, or choose another save_dir."
            raise RankFilesDoNotFit(path=str(path), problem=f"cannot be written: {error}", advice=advice) from error

    on_all_ranks(config.engine.ranks, write, where=str(save_dir))


@binds(load_xser="the files show how they were written")
def load(
    load_dir: str,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    load_xser: bool = False,
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
        load_xser: no effect: the files themselves show whether NxD Core wrote them with ``save_xser``.
        sharded: whether ``load_dir`` has a file for each rank.
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
    config = _config(call)
    target = model if model_or_optimizer is None else model_or_optimizer
    expect(call, "load_dir", load_dir, "a path", when=isinstance(load_dir, str | os.PathLike))
    if target is not None and not isinstance(target, NxDModel | NxDOptimizer):
        raise NotOfThisModel(call=call, problem=f"model_or_optimizer is {type(target).__name__}, and must be one")
    if not sharded and not isinstance(target, NxDModel):
        reason = "needs the model whose shards are cut"
        raise refused(call, "sharded", "False", reason, "Pass model_or_optimizer=model.")
    source, found, values = Path(load_dir), dict[str, Any](), dict[str, Any]()

    def read() -> None:
        path = _path_of(config, source, master_dp_only) if sharded else source
        found.update(_read(path))
        if target is not None:
            chosen = _chosen(found, model_key, path)
            values.update(_values_for(target, chosen, path, sharded=sharded, strict=strict, of_all_dp=master_dp_only))

    on_all_ranks(config.engine.ranks, read, where=str(source))
    if target is None:
        return found
    if isinstance(target, NxDOptimizer):
        groups = (found if model_key is None else found[model_key])["param_groups"]
        target.load_state_dict({"state": values, "param_groups": groups})
    elif sharded:
        target.parallel.load_state_dict(values, strict=strict)
    else:
        _load_whole(target, values, strict, source)
    return {} if model_key is None else {key: value for key, value in found.items() if key != model_key}


def _values_for(
    target: NxDModel | NxDOptimizer, values: dict[str, Any], path: Path, *, sharded: bool, strict: bool, of_all_dp: bool
) -> Mapping[str, torch.Tensor | Piece]:
    """Return what ``target`` loads of the values of a file: this rank's part, or whole tensors."""
    if isinstance(target, NxDOptimizer):
        return optimizer_state(target, values, path, of_all_dp=of_all_dp)
    if not sharded:
        return tensors_of(values, path)
    named = in_our_names(values, target, path, of_all_dp=of_all_dp)
    return shards_of(target, named, strict=strict, of_all_dp=of_all_dp)


def _config(call: str) -> NxDConfig:
    config = current_config()
    if config is None:
        raise ConfigNotMade(call=call)
    return config


def _name(config: NxDConfig, master_dp_only: bool) -> str:
    groups = config.groups
    name = f"tp_rank_{groups.rank('tp'):02d}_pp_rank_{groups.rank('pp'):02d}"
    return name if master_dp_only else f"{name}_dp_rank_{groups.rank('dp'):02d}"


def _path_of(config: NxDConfig, folder: Path, master_dp_only: bool) -> Path:
    """The file of this rank.

    Raises:
        RankFilesDoNotFit: there is none, or those of another layout.
    """
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    ranks = [match for match in map(_RANK.fullmatch, names) if match is not None]
    if not ranks:
        advice = (
            "Name the directory that parallel_layers.save wrote; `load_checkpoint` loads what save_checkpoint saved."
        )
        raise RankFilesDoNotFit(path=str(folder), problem="has no files tp_rank_.._pp_rank_..", advice=advice)
    own = config["tensor_parallel_size"], config.stages
    found = tuple(1 + max(int(each[at]) for each in ranks) for at in (1, 2))
    if found != own:
        problem = "is of tensor_parallel_size={} and pipeline_parallel_size={}, not {} and {}".format(*found, *own)
        advice = "Use the sizes of the save, then save_checkpoint, which every layout can load."
        raise RankFilesDoNotFit(path=str(folder), problem=problem, advice=advice)
    wanted = _name(config, master_dp_only)
    path = folder / wanted
    if not path.exists():
        advice = f"Pass master_dp_only={not master_dp_only} if it was saved so." if ranks else ""
        raise RankFilesDoNotFit(path=str(folder), problem=f"lacks {wanted}", advice=advice)
    return path / _FILE if path.is_dir() else path


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        advice = "Name a file or directory that exists."
        raise RankFilesDoNotFit(path=str(path), problem="is not a file", advice=advice)
    content = _resolved(_opened(path), path)
    if not isinstance(content, dict):
        raise RankFileUnreadable(path=str(path), reason=f"it holds a {type(content).__name__} instead of a dictionary")
    return content


def _opened(path: Path) -> Any:
    try:
        return read_torch_file(path, [(_Reference, "torch_xla.utils.serialization.TensorReference")])
    except TorchFileRefused as refused:
        reason = f"it names {listing(refused.names, 4)}, which could run code"
        raise RankFileUnreadable(path=str(path), reason=reason) from None
    except TorchFileDamaged as damaged:
        raise RankFileUnreadable(path=str(path), reason=str(damaged)) from damaged


class _Reference:
    """A tensor in a separate file: torch-xla's ``TensorReference``, of which only the number is used."""

    tid: object = None

    def __new__(cls, *_: object) -> _Reference:
        return super().__new__(cls)


def _resolved(value: Any, path: Path) -> Any:
    """Return ``value`` with references replaced by their tensors."""
    if isinstance(value, dict):
        return {key: _resolved(each, path) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(each, path) for each in value]
    if not isinstance(value, _Reference):
        return value
    if type(value.tid) is not int or value.tid < 0:
        raise RankFileUnreadable(path=str(path), reason=f"it refers to the tensor {value.tid!r}")
    file = path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt"
    tensor = _opened(file) if file.is_file() else None
    if not isinstance(tensor, torch.Tensor):
        raise RankFileUnreadable(path=str(file), reason="it is missing, or holds no tensor")
    return tensor


def _check(value: Any, where: str) -> None:
    """Raises ArgumentMeansNothing: a value that cannot be saved without a pickle of code."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check(each, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _check(each, f"{where}[{number}]")
    elif not isinstance(value, (torch.Tensor, Piece, *_PLAIN)):
        reason = "is not a tensor, a number, text, or a list or a dictionary of them"
        advice = "Leave it out, or save it elsewhere."
        raise refused("parallel_layers.save", where, type(value).__name__, reason, advice)


def _held(value: Any, *, of_all_dp: bool, down_cast: bool, keeps: bool) -> Any:
    """``value`` with this rank's elements of its tensors, on the host.

    Collective where tensors are sharded over data parallel ranks.

    Args:
        value: what was checked.
        of_all_dp: with the elements that data parallel ranks hold of the same tensor parallel shard.
        down_cast: float32 as bfloat16.
        keeps: False where this rank only takes part.
    """
    if isinstance(value, Piece):
        value = value.tensor
    if isinstance(value, torch.Tensor):
        shard = of_all_dp_ranks(value.detach()) if of_all_dp else value.detach()
        if not keeps:
            return None
        # A copy: torch.save writes all of the memory that a view belongs to.
        local = local_of(shard).to(HOST, copy=True)
        return local.to(torch.bfloat16) if down_cast and local.dtype == torch.float32 else local
    options = {"of_all_dp": of_all_dp, "down_cast": down_cast, "keeps": keeps}
    if isinstance(value, Mapping):
        return {key: _held(each, **options) for key, each in value.items()}
    return [_held(each, **options) for each in value] if isinstance(value, list | tuple) else value


def _chosen(content: dict[str, Any], key: str | None, path: Path) -> dict[str, Any]:
    values = content if key is None else content.get(key)
    if not isinstance(values, dict):
        known = listing(sorted(map(str, content)), 8)
        advice = f"Pass model_key with one of: {known}; or None if the file holds the values alone."
        raise RankFilesDoNotFit(path=str(path), problem=f"has no dictionary '{key}'", advice=advice)
    return values


def _load_whole(model: NxDModel, values: Mapping[str, Any], strict: bool, source: Path) -> None:
    """Load whole tensors, of which each rank takes its part. Collective."""
    own = model.parallel.state_dict().keys()
    everywhere = {name for each in model.nxd_config.engine.ranks.all_gather_object(sorted(own)) for name in each}
    extra = sorted(values.keys() - everywhere) if strict else []
    if extra:
        raise WeightsDoNotFit(missing=[], extra=extra, shapes=[])
    model.load_state_dict({name: value for name, value in values.items() if name in own}, strict=strict)
