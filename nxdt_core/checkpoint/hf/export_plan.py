"""Which files a Hugging Face directory will have, from shapes alone: names, sizes, and what each tensor is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxdt_core.checkpoint.format.safetensors_stream import SafetensorsLayout, TensorSpec, grouped
from nxdt_core.checkpoint.hf.generation_settings import hf_settings
from nxdt_core.checkpoint.hf.json_files import CONFIG, GENERATION_CONFIG, json_bytes
from nxdt_core.checkpoint.hf.key_map import HFTensor, exchange_of, sources
from nxdt_core.checkpoint.hf.source import HFSource
from nxdt_core.checkpoint.hf.weights import INDEX, WEIGHTS
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["MAX_SHARD_BYTES", "HFPlan", "HFShard", "plan_hf"]

MAX_SHARD_BYTES = 5_000_000_000
"""Size of a weights file beyond which another is begun, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFShard:
    """One file of weights in a Hugging Face directory."""

    file: str
    tensors: Mapping[str, HFTensor]
    specs: Mapping[str, TensorSpec]
    """Dtype and shape in the file, by the same names."""

    @property
    def layout(self) -> SafetensorsLayout:
        """Return where each tensor begins and ends in the file."""
        return SafetensorsLayout(self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPlan:
    """The files of a Hugging Face directory that is to be written."""

    shards: tuple[HFShard, ...]
    texts: Mapping[str, bytes]
    """The other files by name, ``config.json`` last: without it nothing takes the directory for a model."""
    notes: tuple[str, ...] = ()
    """What the source of the weights had and the directory lacks, a sentence each."""

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(spec.size_bytes for shard in self.shards for spec in shard.specs.values())

    def digest(self) -> str:
        """Equal where the files would be the same, given the same weights."""
        table = [{name: (spec.dtype, spec.shape) for name, spec in shard.specs.items()} for shard in self.shards]
        texts = {name: content.decode("latin-1") for name, content in self.texts.items()}
        return hashlib.sha256(json.dumps([table, texts]).encode()).hexdigest()


def plan_hf(
    builder: ModelBuilder,
    held: Mapping[str, TensorSpec],
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    more: Mapping[str, bytes] | None = None,
    stop_ids: Sequence[int] = (),
    source: HFSource | None = None,
) -> HFPlan:
    """Plan the directory of a model.

    Args:
        builder: provides the configuration and the names.
        held: dtype and whole shape of each existing tensor, by global name; copies of tied ones are left out.
        tokenizer: its special ids go into the configuration; without one they are those of ``source``, or null.
        dtype: dtype of floating-point tensors in the directory; None keeps their dtypes.
        max_shard_bytes: limit of one weights file; a larger tensor gets a separate file.
        more: further files, such as the tokenizer's.
        stop_ids: tokens that end generation, where the tokenizer's end of text is not the only one.
        source: the directory that the weights came from, whose settings the new one keeps.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        KeyMapIncomplete: its key map does not fit its model.
        WeightsDoNotFit: ``held`` does not match the builder's model.
    """
    found = sources(builder)
    _check(held, {source.name: source.shape for source in found}, {user for _, user in builder.plan().tied})
    tensors = {tensor.name: tensor for source in found for tensor in source.tensors()}
    specs = {
        name: TensorSpec(_dtype(held[tensor.parameter].dtype, dtype), tensor.shape) for name, tensor in tensors.items()
    }
    groups = list(grouped(specs, max_shard_bytes))
    shards = tuple(
        HFShard(
            file=WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors",
            tensors={name: tensors[name] for name in group},
            specs=group,
        )
        for number, group in enumerate(groups, start=1)
    )
    texts: dict[str, bytes] = dict(more or {})
    if len(shards) > 1:
        total = sum(spec.size_bytes for spec in specs.values())
        files = {name: shard.file for shard in shards for name in shard.tensors}
        texts[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": files})
    settings = hf_settings(exchange_of(builder).config_to_hf(), tokenizer, stop_ids, source)
    if settings.generation is not None:
        texts[GENERATION_CONFIG] = json_bytes(settings.generation)
    texts[CONFIG] = json_bytes({**settings.config, "torch_dtype": next(iter(specs.values())).dtype})
    return HFPlan(shards=shards, texts=texts, notes=settings.notes)


def _check(held: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]], users: set[str]) -> None:
    missing = [name for name in shapes if name not in held]
    extra = [name for name in held if name not in shapes and name not in users]
    wrong = [
        f"{name}: {held[name].shape} instead of {shape}"
        for name, shape in shapes.items()
        if name in held and held[name].shape != shape
    ]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=wrong)


def _dtype(own: str, wanted: str | None) -> str:
    return wanted if wanted is not None and own.startswith(("float", "bfloat")) else own
