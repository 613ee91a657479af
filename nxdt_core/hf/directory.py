"""Hugging Face directories: ``config.json`` with safetensors weights, read and written whole.

What the names of tensors mean is the business of a builder's key map
(``ModelBuilder.hf_key_map``). Writing holds no more than one file of weights per worker in memory.
``config.json`` comes last and shows that the directory is complete. An export that was interrupted leaves a note of
what it was; the same export resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.collective import in_threads, on_all_ranks, on_first_rank
from nxdt_core.checkpoint.commit import read_object
from nxdt_core.checkpoint.format.hf_source import CONFIG, GENERATION_CONFIG, SPECIAL, HFSource, json_bytes, read_json
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.shards import SafetensorsLayout, TensorSpec, Writable, dtype_name, grouped
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.read.load import fill
from nxdt_core.checkpoint.storage import explained_os_errors, open_storage
from nxdt_core.errors.base import listing
from nxdt_core.errors.models import HFNotWritable, WeightsDoNotFit
from nxdt_core.hf.key_map import HFTensor, room_for, sources
from nxdt_core.hf.reader import INDEX, WEIGHTS, HFWeights
from nxdt_core.models.rope_scaling import older_rope
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["load_hf", "read_hf_config", "save_hf"]


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


MAX_SHARD_BYTES = 5_000_000_000
"""Size of a weights file beyond which another is begun, as in transformers."""
NOTE = "nxdt-export-unfinished"
"""Name of the file that is in a directory until its export is complete; says what is exported there."""


def hf_settings(
    built: Mapping[str, Any], tokenizer: Tokenizer | None, stop_ids: Sequence[int], source: HFSource | None
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Merge what the run says with what its source said. Where both name a token, the run's tokenizer wins.

    Args:
        built: ``config.json`` as the builder writes it.
        tokenizer: the tokenizer of the run.
        stop_ids: tokens that end what the model writes, by the run's tokenizer and chat template.
        source: the directory that the weights came from; None: they came from elsewhere.

    Returns:
        The content of the JSON files of an export by name, ``config.json`` last, and a sentence for each thing that the
        source had and the export lacks.
    """
    fits = source is not None and source.fits(tokenizer)
    source_config: Mapping[str, Any] = built if source is None else source.config if fits else {}
    token_ids = {key: getattr(tokenizer, f"{key.removesuffix('_token_id')}_id", None) for key in SPECIAL}
    # The token of the run's tokenizer, within the list of several that the source said, if it is one.
    tokens = {key: source_config.get(key) for key in SPECIAL}
    for key, token_id in token_ids.items():
        stated = tokens[key]
        if token_id is not None and not (isinstance(stated, (list, tuple)) and token_id in stated):
            tokens[key] = token_id
    carried = {key: value for key, value in source_config.items() if _is_carried(key)}
    config = {**carried, **older_rope(built), **built, **tokens}
    generation = {
        key: value
        for key, value in ({} if source is None else source.generation).items()
        if key not in _OF_THE_WRITER and (fits or not (key in _HOLD_IDS or key.endswith("_token_id")))
    }
    has_file = tokenizer is not None or bool(generation)
    generation |= {key: value for key, value in token_ids.items() if value is not None}
    stops = [*dict.fromkeys((*(source.stop_ids if source is not None and fits else ()), *stop_ids))]
    if stops:
        generation["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    padding = [] if tokenizer is None else list(range(tokenizer.vocab_size, built.get("vocab_size") or 0))
    if 0 < len(padding) <= _MOST_SUPPRESSED:
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or ()), *padding})
    notes: list[str] = []
    if source is not None and not fits:
        notes.append(f"the token ids of {source.path!r} are not kept: the run's tokenizer gives them to other tokens")
    if source is not None:
        present = {key for key, value in source.config.items() if value is not None and not _is_carried(key)}
        lost = [key for key in source.config if key in present and key not in config and key not in _REWRITTEN]
        if lost:
            keys = listing(lost)
            notes.append(f"config.json of {source.path!r} has keys that this model's export does not write: {keys}")
        if source.left_out:
            notes.append(f"not copied from {source.path!r}: {listing(source.left_out)}")
    contents = {GENERATION_CONFIG: generation} if has_file else {}
    return contents | {CONFIG: config}, tuple(notes)


def _is_carried(key: str) -> bool:
    """Return whether a builder does not know a key that is true of any model with these weights."""
    return any(fnmatchcase(key, pattern) for pattern in _CARRIED)


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
    parameters: Mapping[str, TensorSpec],
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
        parameters: dtype and whole shape of each existing tensor, by global name; copies of tied ones are left out.
        tokenizer: its special ids go into the configuration; without one they are those of ``source``, or null.
        dtype: dtype of floating-point tensors in the directory; None keeps their dtypes.
        max_shard_bytes: limit of one weights file; a larger tensor gets a separate file.
        more: further files, such as the tokenizer's.
        stop_ids: tokens that end generation, where the tokenizer's end of text is not the only one.
        source: the directory that the weights came from, whose settings the new one keeps.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        KeyMapIncomplete: its key map does not fit its model.
        WeightsDoNotFit: ``parameters`` does not match the builder's model.
    """
    parameter_sources = sources(builder)
    shapes, users = {source.name: source.shape for source in parameter_sources}, {u for _, u in builder.plan().tied}
    missing = [name for name in shapes if name not in parameters]
    extra = [name for name in parameters if name not in shapes and name not in users]
    stored = {name: parameters[name].shape for name in shapes if name in parameters}
    wrong = [f"{name}: {shape} instead of {shapes[name]}" for name, shape in stored.items() if shape != shapes[name]]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=wrong)
    tensors: dict[str, tuple[HFTensor, ...]] = {}
    for tensor in (tensor for source in parameter_sources for tensor in source.tensors()):
        tensors[tensor.name] = (*tensors.get(tensor.name, ()), tensor)
    specs: dict[str, TensorSpec] = {}
    for name, parts in tensors.items():
        stored_dtype = parameters[parts[0].parameter].dtype
        changes = dtype is not None and stored_dtype.startswith(("float", "bfloat"))
        specs[name] = TensorSpec(dtype if dtype is not None and changes else stored_dtype, parts[0].shape)
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
    settings, notes = hf_settings(builder.config_to_hf(), tokenizer, stop_ids, source)
    settings[CONFIG]["torch_dtype"] = next(iter(specs.values())).dtype
    texts |= {file: json_bytes(content) for file, content in settings.items()}
    return HFPlan(shards=shards, texts=texts, notes=notes)


ReadShard = Callable[[HFShard], dict[str, torch.Tensor]]
"""Gives the tensors of one file by name, in its dtypes and shapes."""


def write_hf(
    storage: CheckpointStore,
    plan: HFPlan,
    read: ReadShard,
    *,
    origin: str,
    workers: int = 1,
    ranks: RankAgreement | None = None,
) -> None:
    """Write the whole directory to the root of ``storage``. Collective: ranks divide the files of weights.

    Args:
        storage: of the directory; must be empty, or hold what an interrupted export of the same left.
        plan: of the directory; equal on all ranks.
        read: where the weights come from.
        origin: says which weights these are; no others have the same.
        workers: files that each rank writes at the same time.
        ranks: of the export; None for a process that is alone.

    Raises:
        HFNotWritable: the directory holds something else.
        StorageError: a store failed; the same call resumes.
    """
    note = f"{origin}\n{plan.digest()}\n".encode()

    def begin() -> Mapping[str, int]:
        """Return the sizes by name of what an earlier, equal export has written."""
        with explained_os_errors(storage.uri):
            sizes = {info.key: info.size_bytes for info in storage.list()}
            if not sizes:
                with storage.open_write(NOTE) as stream:
                    stream.write(note)
            elif read_object(storage, NOTE) != note:
                raise HFNotWritable(directory=storage.uri)
            return sizes

    done = on_first_rank(ranks, begin, where=storage.uri)
    left = [shard for shard in plan.shards if done.get(shard.file) != shard.layout.size_bytes]
    mine = left if ranks is None else left[ranks.rank :: ranks.world_size]

    def write() -> None:
        with explained_os_errors(storage.uri):
            write_shards(storage.open_write, mine, read, workers=workers)

    on_all_ranks(ranks, write, where=storage.uri)

    def finish() -> None:
        with explained_os_errors(storage.uri):
            for name, content in plan.texts.items():
                with storage.open_write(name) as stream:
                    stream.write(content)
            storage.delete_many([NOTE])

    on_first_rank(ranks, finish, where=storage.uri)


def write_shards(
    open_file: Callable[[str], AbstractContextManager[Writable]],
    shards: Sequence[HFShard],
    read: ReadShard,
    *,
    workers: int = 1,
) -> None:
    """Write files of weights, each by the name that the plan gives it, ``workers`` of them at the same time."""

    def write(shard: HFShard) -> None:
        tensors, layout = read(shard), shard.layout
        with open_file(shard.file) as stream:
            layout.write(stream, (tensors.pop(name) for name in layout.names))

    in_threads(write, shards, threads=workers)


def read_from(
    storage: CheckpointStore, manifest: Manifest, index: Mapping[str, TensorEntry] | None = None
) -> ReadShard:
    """Return a function that reads and verifies the parts of parameters that a file needs, from an nxdt checkpoint.

    ``index``: locations of the tensors by name; None uses those of the model.
    """
    places = manifest.tensors.get("model", {}) if index is None else index

    def read(shard: HFShard) -> dict[str, torch.Tensor]:
        local_shards, entries, made = {}, {}, {}
        for name, parts in shard.tensors.items():
            regions, made[name] = room_for(parts, getattr(torch, shard.specs[name].dtype))
            for part, region in zip(parts, regions, strict=True):
                key = f"{name} of {part.parameter}"
                local_shards[key] = LocalShard(region, part.parameter_shape, part.region)
                entries[key] = places[places[part.parameter].same_as or part.parameter]
        with explained_os_errors(f"{storage.uri}/{manifest.prefix}model"):
            fill(storage, manifest, local_shards, entries)
        return {name: make() for name, make in made.items()}

    return read


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
    specs = {name: TensorSpec(dtype_name(tensor), tuple(tensor.shape)) for name, tensor in state_dict.items()}
    plan = plan_hf(builder, specs, tokenizer, max_shard_bytes=max_shard_bytes)
    storage = open_storage(str(directory))
    if next(storage.list(), None) is not None:
        raise HFNotWritable(directory=str(directory))

    def read(shard: HFShard) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, parts in shard.tensors.items():
            regions = [
                state_dict[part.parameter][part.region.within(TensorSlice.whole(part.parameter_shape))]
                for part in parts
            ]
            if len(parts) == 1:  # without a copy
                tensors[name] = parts[0].transform.write(regions[0])
                continue
            targets, make = room_for(parts, regions[0].dtype)
            for target, region in zip(targets, regions, strict=True):
                target.copy_(region)
            tensors[name] = make()
        return tensors

    write_hf(storage, plan, read, origin="memory")
