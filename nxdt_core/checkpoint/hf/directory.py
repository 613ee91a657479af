"""Hugging Face directories: ``config.json`` with safetensors weights, read and written through a builder's key map.

Tensors are read one at a time out of mapped files; nothing is ever unpickled. What the names mean is the builder's
business (:class:`~nxdt_core.protocols.model.HFExchange`), not this module's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.format.safetensors_stream import TensorSpec
from nxdt_core.checkpoint.hf.export_plan import MAX_SHARD_BYTES, HFShard, plan_hf
from nxdt_core.checkpoint.hf.json_files import CONFIG, read_json
from nxdt_core.checkpoint.hf.weights import HFWeights
from nxdt_core.checkpoint.hf.write import write_hf
from nxdt_core.checkpoint.pieces import dtype_name
from nxdt_core.checkpoint.storage import open_storage
from nxdt_core.errors.models import HFNotWritable
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["iterate_hf", "load_hf", "read_hf_config", "save_hf"]


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Return the ``config.json`` of ``directory``.

    Raises:
        HFFileMissing: there is none.
        HFFileDamaged: it is not a JSON object.
    """
    return read_json(Path(directory), CONFIG)


def load_hf(directory: str | Path, builder: ModelBuilder) -> dict[str, torch.Tensor]:
    """Return all parameters by global name, on the CPU, in the dtype of the files; a tied one once, under its owner's
    name.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFFileMissing: the directory or its weights are not there.
        HFFileDamaged: a file is truncated or no safetensors file.
        WeightsDoNotFit: names or shapes are not those of the builder's model.
    """
    return dict(iterate_hf(directory, builder))


def iterate_hf(directory: str | Path, builder: ModelBuilder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of :func:`load_hf`, one in memory at a time; names are checked before the first is read."""
    with HFWeights(Path(directory)) as weights:
        for source in weights.sources(builder):
            yield source.name, weights.read(source)


def save_hf(
    directory: str | Path,
    builder: ModelBuilder,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the weights so that ``AutoModelForCausalLM.from_pretrained`` loads them.

    Args:
        directory: created if it does not exist; otherwise it must be empty.
        builder: provides the configuration and the names.
        state_dict: all parameters by global name, whole; copies of tied ones are left out.
        tokenizer: its special ids go into ``config.json``; without one they are null there.
        max_shard_bytes: limit of one weights file; a larger tensor gets a separate file.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFNotWritable: the directory holds something already.
        WeightsDoNotFit: ``state_dict`` does not match the builder's model.
    """
    held = {name: TensorSpec(dtype_name(tensor), tuple(tensor.shape)) for name, tensor in state_dict.items()}
    plan = plan_hf(builder, held, tokenizer, max_shard_bytes=max_shard_bytes)
    storage = open_storage(str(directory))
    if next(storage.list(), None) is not None:
        raise HFNotWritable(directory=str(directory))

    def read(shard: HFShard) -> dict[str, torch.Tensor]:
        pairs = ((tensor, state_dict[tensor.parameter]) for tensor in shard.tensors.values())
        return {
            tensor.name: tensor.of(whole[tensor.box.within(Box.whole(tuple(whole.shape)))]) for tensor, whole in pairs
        }

    write_hf(storage, plan, read, origin="memory")
