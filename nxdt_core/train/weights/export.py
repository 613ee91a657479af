"""From a checkpoint of ours to a Hugging Face directory or a GGUF file: what ``nxdt checkpoint export`` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest
from nxdt_core.checkpoint.collective import on_first_rank, on_this_rank
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import hf_name
from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.checkpoint.format.manifest import FileEntry
from nxdt_core.checkpoint.format.shards import TensorSpec
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.read.status import list_checkpoints, newest_first, nothing_at
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.chat.rendering import stop_ids
from nxdt_core.data.chat.templates import named_template
from nxdt_core.errors.checkpoints import CheckpointNotFound
from nxdt_core.hf.directory import MAX_SHARD_BYTES, HFPlan, ReadShard, plan_hf, read_from, write_hf, write_shards
from nxdt_core.hf.gguf import GgufDtype, write_gguf
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.weights.average import AVERAGE, average_index
from nxdt_core.train.weights.saved_config import SavedRun, locate, named_config, own_run, saved_run

ExportDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    source: str
    """Address of the checkpoint."""
    target: str
    step: int
    files: tuple[str, ...] = ()
    size_bytes: int = 0
    """Size of all weights."""
    notes: tuple[str, ...] = ()
    """Gaps of the directory, a sentence each."""
    pushed: str | None = None
    """Name and commit on the Hugging Face hub; None where it was not uploaded."""


def export_hf(
    source: str,
    target: str,
    *,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int = 1,
    average: bool = False,
    config: str | None = None,
    trusted: Sequence[str] = (),
    ranks: RankAgreement | None = None,
) -> Exported:
    """Write the model of a checkpoint as a directory that ``AutoModelForCausalLM.from_pretrained`` loads.

    Each rank holds about ``max_shard_bytes`` for each worker, never the model. What is read is verified. The same call
    resumes where an interrupted one stopped. Collective: it succeeds on all ranks or fails on all.

    Args:
        source: a checkpoint, or the root of a run's checkpoints (the newest committed one is taken).
        target: a directory or the address of another store, empty.
        dtype: of floating-point tensors; None keeps those of the checkpoint.
        max_shard_bytes: largest size of one file of weights, in bytes.
        workers: files that each rank writes at the same time.
        average: write the average of the weights (``exp_manager.ema``) instead of the weights.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that the checkpoint keeps.
        trusted: files of public keys, one of which must have signed the checkpoint; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.
        ranks: that divide the files; None for a process that is alone.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointHasNoAverage: its run kept none.
        CheckpointDamaged: a file of it is not what was written.
        CheckpointNotTrusted: it lacks a valid signature of one of the keys.
        SavedConfigUnusable: its model cannot be built here, or needs what a checkpoint may not decide.
        HFExchangeUnsupported: its model has no counterpart at Hugging Face.
        HFNotWritable: ``target`` is not empty.
    """
    export = _find_export(
        source, target, config, trusted, ranks, average=average, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    place = checkpoint.open_storage(target, export.kernel)
    write_hf(place, export.plan, export.read, origin=export.origin, workers=workers, ranks=ranks)
    files = (*(shard.file for shard in export.plan.shards), *export.plan.texts)
    return replace(export.result, target=place.uri, files=files, size_bytes=export.plan.size_bytes)


def export_gguf(
    source: str,
    target: str,
    *,
    dtype: GgufDtype = "float16",
    average: bool = False,
    config: str | None = None,
    trusted: Sequence[str] = (),
) -> Exported:
    """Write the model of a checkpoint as one GGUF file, which llama.cpp and Ollama run.

    One tensor is in memory at a time. What is read is verified.

    Args:
        source, average, config, trusted: as of :func:`export_hf`.
        target: path of the file.
        dtype: of matrices.

    Raises:
        GgufUnsupported: llama.cpp does not run such a model or tokenizer.
        GgufLibraryMissing: the package ``gguf`` is not installed.
        NxdtError: as of :func:`export_hf`.
    """
    export = _find_export(source, target, config, trusted, None, average=average)
    path, result = Path(target), export.result
    size_bytes, notes = write_gguf(path, export.plan, export.read, dtype=dtype, name=path.stem)
    return replace(result, files=(path.name,), size_bytes=size_bytes, notes=(*result.notes, *notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """A checkpoint that is exported, and the Hugging Face directory that it becomes."""

    plan: HFPlan
    read: ReadShard
    origin: str
    """Says which weights these are."""
    kernel: Kernel | None
    result: Exported
    """Without files so far."""


def _find_export(
    source: str,
    target: str,
    config: str | None,
    trusted: Sequence[str],
    ranks: RankAgreement | None,
    *,
    average: bool,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> _Export:
    named, keys = named_config(config, trusted)
    storage, step = locate(source, named)

    def read() -> Manifest:
        """Read the manifest of the step, or of the newest committed one. Damage in its files shows later."""
        wanted = step
        if wanted is None:
            wanted = next((status.step for status in newest_first(storage) if status.state == "committed"), None)
        if wanted is None:
            raise CheckpointNotFound(where=storage.uri, reason=nothing_at(storage, list_checkpoints(storage)))
        with explained_os_errors(storage.uri):
            return checkpoint.read_manifest(storage, wanted, trusted=keys)

    manifest = on_first_rank(ranks, read, where=source)
    address = build.step_uri(storage, manifest.step)
    index = average_index(manifest, where=address) if average else manifest.tensors.get("model", {})

    def plan_files() -> tuple[HFPlan, tuple[str, ...]]:
        saved = saved_run(manifest, where=address, config=named)
        return plan_export(saved, manifest, index, dtype=dtype, max_shard_bytes=max_shard_bytes)

    plan, notes = on_this_rank(ranks, plan_files, where=source)
    return _Export(
        plan=plan,
        read=read_from(storage, manifest, index),
        origin=f"{storage.uri}/{manifest.prefix}{AVERAGE if average else ''}",
        kernel=None if named is None else named.kernel,
        result=Exported(source=address, target=target, step=manifest.step, notes=notes),
    )


def plan_export(
    saved: SavedRun,
    manifest: Manifest,
    index: Mapping[str, TensorEntry] | None = None,
    *,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[HFPlan, tuple[str, ...]]:
    """Return the files of an export, and what they will lack.

    Args:
        saved: the run that wrote the checkpoint.
        manifest: the committed manifest of the checkpoint.
        index: its tensors by name; None takes those of the model.
        dtype, max_shard_bytes: as of :func:`export_hf`.
    """
    config = saved.config
    tokenizer = build.tokenizer(config)
    files, notes = tokenizer_files(saved, tokenizer)
    places = manifest.tensors.get("model", {}) if index is None else index
    specs = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in places.items()}
    builder = build.model_builder(config)
    stops = () if tokenizer is None else stop_ids(saved.chat_keys, tokenizer)
    plan = plan_hf(
        builder,
        specs,
        tokenizer,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        more=files,
        stop_ids=stops,
        source=HFSource.of_facts(manifest.facts.hf),
    )
    return plan, (*notes, *plan.notes)


def tokenizer_files(saved: SavedRun, tokenizer: Tokenizer | None) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
    """Return the files of a run's tokenizer and chat template for transformers, or none and a note on the reason."""
    files: Mapping[str, bytes] = {} if tokenizer is None else tokenizer.hf_files()
    if not files:
        named = saved.config.components["tokenizer"]
        whose = "the run names none" if named is None else f"transformers has none like {named.component.record.name!r}"
        return {}, (f"no tokenizer is included: {whose}",)
    template = named_template(saved.chat_keys, tokenizer)
    return (files if template is None else {**files, "chat_template.jinja": template.text.encode()}), ()


class HFForm:
    """Writes, into every ``every``-th save, a directory that transformers loads; ranks divide its files.

    Given to a :class:`~nxdt_core.checkpoint.CheckpointManager` as ``add_files``. The tensors are read back from the
    save's own files, verified: no rank holds more than one file of weights, in any layout.

    Raises:
        HFExchangeUnsupported: the run's model has no counterpart at Hugging Face.
    """

    def __init__(self, config: ResolvedConfig, storage: CheckpointStore, ranks: RankAgreement, *, every: int) -> None:
        build.model_builder(config).hf_key_map()  # raises where it has none
        self._run = own_run(config)
        self._storage = storage
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._every = every
        self._saves = 0
        """Number of saves so far. It is the same on all ranks, since each is called once per save."""

    def __call__(self, manifest: Manifest) -> Mapping[str, FileEntry]:
        """Write this rank's files next to those of the save that ``manifest`` is about to commit."""
        self._saves += 1
        if self._saves % self._every:
            return {}
        plan, _ = plan_export(self._run, manifest)
        writer = AttemptWriter(self._storage, manifest.prefix, manifest.digests)
        with explained_os_errors(f"{self._storage.uri}/{manifest.prefix}"):
            mine = plan.shards[self._rank :: self._world_size]
            write_shards(lambda name: writer.file(hf_name(name)), mine, read_from(self._storage, manifest))
            for name, content in plan.texts.items() if self._rank == 0 else ():
                with writer.file(hf_name(name)) as stream:
                    stream.write(content)
        return writer.entries
