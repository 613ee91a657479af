"""Start from a saved adapter (``load_lora_from_ckpt``): one of a run here, or one that peft wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_all_ranks
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.checkpoint.signing import refuse_foreign
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.placement import piece_of
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.piece import Box
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.train import build
from nxdt_core.train.weights.base import base_digest, without_base
from nxdt_core.train.weights.saved_config import saved_adapter
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import AdapterDiffers
from nxdt_plugin_lora.peft_files import differences, is_peft, read_config, read_peft, unsupported_options
from nxdt_plugin_lora.peft_names import peft_tensors
from nxdt_plugin_lora.targets import tables_of

_COMPUTED = ("lora_rank", "lora_alpha", "use_rslora", "use_dora")


def load_adapter(own: LoraConfig, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Fill what trains. Collective: it succeeds on all ranks or fails on all.

    Raises:
        AdapterDiffers: it was trained with other options.
        AdapterOfAnotherBase: it was trained over other weights.
        WeightsDoNotFit: it has updates of other layers.
    """
    assert own.lora_save_dir is not None
    directory = Path(own.lora_save_dir, "" if own.lora_load_tag is None else str(own.lora_load_tag))
    if is_peft(directory):
        refuse_foreign(build.trusted_keys(config), directory)
        _load_peft(directory, own, model, config, ranks)
    else:
        _load_checkpoint(own, model, config, ranks)


def check_options(own: LoraConfig, saved: Mapping[str, Any], where: str) -> None:
    """See that weights of a run with the section ``saved`` compute the same here.

    Raises:
        AdapterDiffers: they do not.
    """
    different = [
        f"{key} is {saved.get(key)} there and {getattr(own, key)} here"
        for key in _COMPUTED
        if saved.get(key) != getattr(own, key)
    ]
    if different:
        raise AdapterDiffers(where=where, differences=different)


def _load_checkpoint(own: LoraConfig, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
    uri = str(own.lora_save_dir)
    if own.lora_load_tag is not None:
        tag = str(own.lora_load_tag)
        uri = f"{uri.rstrip('/')}/{step_name(int(tag)) if tag.isdigit() else tag}"
    storage, step = build.locate(config, uri)
    trusted = build.trusted_keys(config)
    manifest = checkpoint.find_checkpoint(storage, step, warn=lambda _: None, ranks=ranks, trusted=trusted)
    where = build.step_uri(storage, manifest.step)
    check_options(own, saved_adapter(manifest, config), where)
    if manifest.facts.base and manifest.facts.base != base_digest(model, ranks):
        raise AdapterOfAnotherBase(where=where, base="this run")
    weights = without_base(model, model.state_dict())
    unmatched = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=manifest.facts.without_base
    )
    if unmatched.missing:
        raise WeightsDoNotFit(missing=unmatched.missing, extra=[], shapes=[])
    model.load_state_dict(weights, strict=False)


def _load_peft(
    directory: Path, own: LoraConfig, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement
) -> None:
    digest = base_digest(model, ranks)
    held = without_base(model, model.state_dict())
    own_shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    shapes = {name: shape for each in ranks.all_gather_object(own_shapes) for name, shape in each.items()}

    def fill() -> None:
        _check_peft_options(own, directory)
        builder = build.model_builder(config)
        found, base = read_peft(directory, peft_tensors(builder, shapes, tables_of(builder)), shapes)
        if base and base != digest:
            raise AdapterOfAnotherBase(where=str(directory), base="this run")
        with torch.no_grad():
            for name, tensor in held.items():
                piece = piece_of(tensor, name)
                piece.tensor.copy_(found[name][piece.box.within(Box.whole(piece.shape))])

    on_all_ranks(ranks, fill, where=str(directory))
    model.load_state_dict(held, strict=False)


def _check_peft_options(own: LoraConfig, directory: Path) -> None:
    theirs = read_config(directory)
    strange = list(unsupported_options(theirs))
    if strange:
        raise AdapterDiffers(
            where=str(directory),
            differences=[problem for problem, _ in strange],
            remedies=tuple(remedy for _, remedy in strange),
        )
    different = list(differences(own, theirs))
    if different:
        raise AdapterDiffers(where=str(directory), differences=different)
