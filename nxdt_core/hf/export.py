"""The files of an export to a Hugging Face directory, from shapes alone, and the content of its JSON files.

``generation_config.json`` and the token ids of ``config.json`` come from the run's tokenizer and chat template, and
from the directory that the weights came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nxdt_core.checkpoint.format.hf_source import CONFIG, GENERATION_CONFIG, SPECIAL, HFSource, json_bytes
from nxdt_core.checkpoint.format.shards import SafetensorsLayout, TensorSpec, grouped
from nxdt_core.errors.base import listing
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.hf.key_map import HFTensor, sources
from nxdt_core.hf.reader import INDEX, WEIGHTS
from nxdt_core.models.rope_scaling import older_rope
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["MAX_SHARD_BYTES", "HFPlan", "HFSettings", "HFShard", "hf_settings", "plan_hf"]


_MOST_SUPPRESSED = 1024
"""Rows of the embedding beyond the tokenizer's ids that are padding, and are kept from being generated; where there are
more, the tokenizer is not that of the model."""
_CARRIED = (
    *("*_token_id", "use_cache", "pretraining_tp", "task_specific_params", "output_router_logits", "is_decoder"),
    *("summary_*", "reorder_and_upcast_attn", "classifier_dropout", "max_window_layers", "layer_types"),
)
"""Keys of ``config.json`` that say how the model is used, and not what its logits are; the last two of layers with a
window, which the native models have in all layers or in none."""
_REWRITTEN = (
    *("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "architectures", "model_type"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"),
    "original_max_position_embeddings",
)
"""Keys of ``config.json`` that an export words otherwise, or that are of the program that wrote the file."""
_OF_THE_WRITER = ("transformers_version", "_from_model_config")
"""Keys of ``generation_config.json`` that are of the program that wrote the file."""
_HOLD_IDS = (
    *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "bad_words_ids", "force_words_ids"),
    *("sequence_bias", "lang_to_id", "task_to_id"),
)
"""Keys of ``generation_config.json`` with token ids, in addition to those that end in ``_token_id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSettings:
    """Content of the two JSON files of an export, with notes."""

    config: Mapping[str, Any]
    """Content of ``config.json``."""
    generation: Mapping[str, Any] | None
    """Content of ``generation_config.json``; None: it is left out."""
    notes: tuple[str, ...]
    """Notes on what the source had and the export lacks, a sentence each."""


def hf_settings(
    built: Mapping[str, Any], tokenizer: Tokenizer | None, stop_ids: Sequence[int], source: HFSource | None
) -> HFSettings:
    """Merge what the run says with what its source said. Where both name a token, the run's tokenizer wins.

    Args:
        built: ``config.json`` as the builder writes it.
        tokenizer: the tokenizer of the run.
        stop_ids: tokens that end what the model writes, by the run's tokenizer and chat template.
        source: the directory that the weights came from; None: they came from elsewhere.
    """
    fits = source is not None and source.fits(tokenizer)
    source_config: Mapping[str, Any] = built if source is None else source.config if fits else {}
    token_ids = {key: getattr(tokenizer, f"{key.removesuffix('_token_id')}_id", None) for key in SPECIAL}
    tokens = {key: _token(source_config.get(key), token_ids[key]) for key in SPECIAL}
    carried = {key: value for key, value in source_config.items() if _is_carried(key)}
    config = {**carried, **older_rope(built), **built, **tokens}
    generation = {} if source is None else _kept(source.generation, fits=fits)
    has_file = tokenizer is not None or bool(generation)
    generation |= {key: value for key, value in token_ids.items() if value is not None}
    stops = [*dict.fromkeys((*(source.stop_ids if source is not None and fits else ()), *stop_ids))]
    if stops:
        generation["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    padding = [] if tokenizer is None else list(range(tokenizer.vocab_size, built.get("vocab_size") or 0))
    if 0 < len(padding) <= _MOST_SUPPRESSED:
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or ()), *padding})
    notes = () if source is None else tuple(_notes(source, config, fits=fits))
    return HFSettings(config=config, generation=generation if has_file else None, notes=notes)


def _token(stated: Any, token_id: int | None) -> Any:
    """Return the token of the run's tokenizer, within the list of several that the source said, if it is one."""
    if token_id is None or (isinstance(stated, (list, tuple)) and token_id in stated):
        return stated
    return token_id


def _is_carried(key: str) -> bool:
    """Return whether a builder does not know a key that is true of any model with these weights."""
    return any(fnmatchcase(key, pattern) for pattern in _CARRIED)


def _kept(generation: Mapping[str, Any], *, fits: bool) -> dict[str, Any]:
    return {
        key: value
        for key, value in generation.items()
        if key not in _OF_THE_WRITER and (fits or not (key in _HOLD_IDS or key.endswith("_token_id")))
    }


def _notes(source: HFSource, config: Mapping[str, Any], *, fits: bool) -> Iterator[str]:
    if not fits:
        yield f"the token ids of {source.path!r} are not kept: the run's tokenizer gives them to other tokens"
    lost = [
        key
        for key, value in source.config.items()
        if value is not None and key not in config and key not in _REWRITTEN and not _is_carried(key)
    ]
    if lost:
        yield f"config.json of {source.path!r} has keys that this model's export does not write: {listing(lost)}"
    if source.left_out:
        yield f"not copied from {source.path!r}: {listing(source.left_out)}"


MAX_SHARD_BYTES = 5_000_000_000
"""Size of a weights file beyond which another is begun, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFShard:
    """One file of weights in a Hugging Face directory."""

    file: str
    tensors: Mapping[str, tuple[HFTensor, ...]]
    """Tensors of each parameter by its name; several where parameters share a tensor."""
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
    """Notes on what the source of the weights had and the directory lacks, a sentence each."""

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
    parameter_sources = sources(builder)
    _check(held, {source.name: source.shape for source in parameter_sources}, {user for _, user in builder.plan().tied})
    tensors: dict[str, tuple[HFTensor, ...]] = {}
    for tensor in (tensor for source in parameter_sources for tensor in source.tensors()):
        tensors[tensor.name] = (*tensors.get(tensor.name, ()), tensor)
    specs = {
        name: TensorSpec(_dtype(held[parts[0].parameter].dtype, dtype), parts[0].shape)
        for name, parts in tensors.items()
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
    settings = hf_settings(builder.config_to_hf(), tokenizer, stop_ids, source)
    if settings.generation is not None:
        texts[GENERATION_CONFIG] = json_bytes(settings.generation)
    texts[CONFIG] = json_bytes({**settings.config, "torch_dtype": next(iter(specs.values())).dtype})
    return HFPlan(shards=shards, texts=texts, notes=settings.notes)


def _check(specs: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...]], users: set[str]) -> None:
    missing = [name for name in shapes if name not in specs]
    extra = [name for name in specs if name not in shapes and name not in users]
    wrong = [
        f"{name}: {specs[name].shape} instead of {shape}"
        for name, shape in shapes.items()
        if name in specs and specs[name].shape != shape
    ]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=wrong)


def _dtype(stored: str, wanted: str | None) -> str:
    return wanted if wanted is not None and stored.startswith(("float", "bfloat")) else stored
