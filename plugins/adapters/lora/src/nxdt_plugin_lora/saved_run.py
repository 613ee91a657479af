"""A LoRA run's checkpoint, opened on one process, merged into one of a plain model, or exported to peft.

The commands ``nxdt checkpoint merge-lora`` and ``nxdt checkpoint export-lora`` call these.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest, Signer, TrustedKeys, save
from nxdt_core.checkpoint.collective import on_first_rank, rank_of
from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.checkpoint.write.save import Planner, SavePlan
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import meta_device
from nxdt_core.errors.models import HFNotWritable
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import Listing, ShardInfo, TensorKey, TensorSlice
from nxdt_core.system.regular_files import make_directory, replace_text
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.weights.export import tokenizer_files
from nxdt_core.train.weights.importing import check_empty, encode_counters
from nxdt_core.train.weights.loading import base_weights
from nxdt_core.train.weights.saved_config import SavedRun, base_step, locate, named_config, saved_run
from nxdt_plugin_lora.adaptation import adapt, tables_of
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import MergeUnties, NoAdapterHere
from nxdt_plugin_lora.peft_files import CONFIG, base_of, describe, peft_config, write_peft

_OF_THE_ADAPTER = ("adapter", "model_alignment_strategy")
"""Sections that a merged model's run has no more."""
MERGED = "-merged"
"""Suffix of the address of a run's checkpoints, under which the merged model is committed."""
_DIRECTORY = "lora_adapter"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLora:
    """A checkpoint of a LoRA run."""

    storage: CheckpointStore
    manifest: Manifest
    run: SavedRun
    lora: LoraConfig
    trained: Mapping[str, tuple[int, ...]]
    """Shapes of all that trained and of its frozen initial values, by name."""

    @property
    def uri(self) -> str:
        """Address of the checkpoint."""
        return build.step_uri(self.storage, self.manifest.step)

    @property
    def updated(self) -> Mapping[str, Mapping[str, str]]:
        """Return, by the name of a matrix, the parameters of its update by kind (``lora_A``, …)."""
        updates: dict[str, dict[str, str]] = {}
        for name in self.trained:
            leaf = base_of(name)
            if leaf is not None:
                updates.setdefault(leaf.base, {})[leaf.kind] = name
        return updates

    def read(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield trained parameters in order, whole."""
        return checkpoint.iterate_model(self.storage, self.manifest, names)


def open_saved(
    storage: CheckpointStore,
    step: int | None,
    *,
    reads_base: bool,
    config: ResolvedConfig | None = None,
    trusted: TrustedKeys | None = None,
) -> SavedLora:
    """Return one checkpoint of a run.

    Args:
        storage: the store that holds the run's checkpoints.
        step: step of the checkpoint; None selects the newest valid one.
        reads_base: whether the frozen weights will be read from where the run read them.
        config: decides in place of the configuration that the checkpoint keeps.
        trusted: keys, one of which must have signed the checkpoint and its base; None requires no signature.

    Raises:
        NoAdapterHere: the run trained without LoRA.
        CheckpointNotFound, SavedConfigUnusable: the checkpoint cannot be opened.
    """
    manifest = checkpoint.find_checkpoint(storage, step, warn=_log.warning, trusted=trusted)
    uri = build.step_uri(storage, manifest.step)
    saved = saved_run(manifest, where=uri, config=config, base=reads_base)
    run = saved.config
    chosen = run.components["adapter"]
    if chosen is None or not isinstance(chosen.config, LoraConfig) or not chosen.config.enable_lora:
        raise NoAdapterHere(where=uri)
    builder = build.model_builder(run)
    with meta_device():
        model = builder.build()
        adapt(model, builder.plan(), chosen.config)
    return SavedLora(
        storage=storage,
        manifest=manifest,
        run=saved,
        lora=chosen.config,
        trained={name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad or base_of(name)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge, which is committed."""

    source: str
    target: str
    """Address of the checkpoint."""
    step: int
    merged: int
    """Matrices with an update."""
    size_bytes: int


def merge_lora(
    source: CheckpointStore,
    step: int | None,
    target: CheckpointStore,
    *,
    base: str | None = None,
    ranks: RankAgreement | None = None,
    keep_others: bool = False,
    signer: Signer | None = None,
    config: ResolvedConfig | None = None,
    trusted: TrustedKeys | None = None,
) -> Merged:
    """Commit the model that a LoRA run trained as a checkpoint without an adapter, under the same step.

    Each rank holds about 256 MiB of the weights and of the updates at a time. Updates are added in float32. Collective:
    it succeeds on all ranks or fails on all.

    Args:
        source: a run's checkpoints.
        step: of the one to merge; None takes the newest good one.
        target: another store, without checkpoints if not ``keep_others``.
        base: address of the frozen weights, where they are not where the run took them.
        ranks: that divide the matrices; None for a process that is alone.
        keep_others: whether ``target`` may hold other steps; the same step is replaced.
        signer: signs the merged checkpoint.
        config: decides in place of the configuration that the checkpoint keeps.
        trusted: keys of which one must have signed what is merged; None requires no signature.

    Raises:
        NoAdapterHere: the run had none.
        AdapterOfAnotherBase: the frozen weights are others than the run's.
        MergeUnties: the update is of one of two tied matrices.
        ImportPlaceTaken: ``target`` holds a checkpoint.
    """
    saved = open_saved(source, step, reads_base=base is None, config=config, trusted=trusted)
    weights = base_weights(saved.run.config, source, saved.manifest, base=base, trusted=trusted)
    builder, facts = build.model_builder(saved.run.config), saved.manifest.facts
    for owner, user in builder.plan().tied:
        if {owner, user} & saved.updated.keys():
            raise MergeUnties(owner=owner, user=user)
    uri = build.step_uri(target, saved.manifest.step)
    listing: Listing = {
        ("model", name): ShardInfo(dtype=spec.dtype, shape=spec.shape, region=TensorSlice.whole(spec.shape))
        for name, spec in weights.specs.items()
        if base_of(name) is None
    }
    updated, tables, rank = saved.updated, tables_of(builder), rank_of(ranks)

    def prepare() -> Listing:
        if rank == 0:
            if not keep_others:
                check_empty(target)
            frozen = [name for _, name in listing if name not in saved.trained]
            weights.check(frozen, facts.base, where=saved.uri)
        return listing

    def read(keys: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        names = [name for _, name in keys]
        frozen = weights.values([name for name in names if name not in saved.trained])
        needed = {name: [name] * (name in saved.trained) + [*updated.get(name, {}).values()] for name in names}
        trained = saved.read([part for parts in needed.values() for part in parts])
        for name in names:
            weight = next(trained if name in saved.trained else frozen)
            if name in updated:
                update = {kind: next(trained) for kind in updated[name]}
                scaling = saved.lora.scaling_of(name.removesuffix(".weight"))
                weight = merged_weight(weight, update, scaling, table=name in tables)
            yield weight.to(getattr(torch, listing["model", name].dtype))

    train = TrainState(
        step=saved.manifest.step,
        consumed_samples=facts.consumed_samples,
        consumed_tokens=facts.consumed_tokens,
        updates=facts.updates,
    )
    plan = SavePlan(
        step=saved.manifest.step,
        facts=replace(
            facts,
            config={key: value for key, value in facts.config.items() if key not in _OF_THE_ADAPTER},
            base="",
            without_base=False,
            fencing=0,
            keep="regular",
            elements=sum(info.region.elements for info in listing.values()),
        ),
        assignment=Planner(ranks).plan(prepare, where=uri),
        read=read,
        state=encode_counters(train) if rank == 0 else None,
    )
    size_bytes = save(target, plan, ranks=ranks, signer=signer).size_bytes
    return Merged(source=saved.uri, target=uri, step=plan.step, merged=len(updated), size_bytes=size_bytes)


def merged_weight(
    weight: torch.Tensor, update: Mapping[str, torch.Tensor], scaling: float, *, table: bool = False
) -> torch.Tensor:
    """Return ``weight`` [out, in], of experts [experts, out, in], or a ``table`` [rows, width], with its update, in its
    own dtype. ``update`` has the parameters of that by kind, and ``scaling`` multiplies their product."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    whole = weight.to(wide)
    for suffix, factor in ("", scaling), ("0", -scaling):
        if f"lora_A{suffix}" in update:
            down, up = update[f"lora_A{suffix}"].to(wide), update[f"lora_B{suffix}"].to(wide)
            whole = whole + factor * (down @ up if table else up @ down)
    if "lora_magnitude" in update:
        inputs = 0 if table else 1
        norms = torch.linalg.vector_norm(whole, dim=inputs, keepdim=True)
        whole = whole * (update["lora_magnitude"].to(wide).unsqueeze(inputs) / norms)
    return whole.to(weight.dtype)


def write_options(lora: LoraConfig, run_dir: Path) -> None:
    """Write ``lora_adapter/adapter_config.json``: the section in peft's words, targets as they are named here.

    Raises:
        CannotWriteRunDirectory: it cannot be written.
    """
    content = peft_config(
        lora, base=None, targets=lora.target_modules, whole=lora.modules_to_save, modules=(), transposed=False
    )
    try:
        replace_text(make_directory(run_dir / _DIRECTORY) / CONFIG, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        reason = f"{_DIRECTORY}: {error.strerror or error}"
        raise CannotWriteRunDirectory(path=str(run_dir), reason=reason) from error


def merge_last(uri: str, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Merge the checkpoint at ``uri`` into the store next to its own, unless it was already; an older merged step
    goes. Both are reached as ``checkpoint.storage`` of ``config`` says. Collective."""
    storage, step = build.locate(config, uri)
    assert step is not None
    place, _ = build.locate(config, f"{storage.uri}{MERGED}")

    def is_merged() -> bool:
        merged = {status.step for status in checkpoint.list_checkpoints(place) if status.state == "committed"}
        created = checkpoint.read_manifest(storage, step).created
        return step in merged and checkpoint.read_manifest(place, step).created > created

    if on_first_rank(ranks, is_merged, where=place.uri):
        return
    merged = merge_lora(
        storage,
        step,
        place,
        ranks=ranks,
        keep_others=True,
        signer=build.signer(config),
        config=config,
        trusted=build.trusted_keys(config),
    )
    if ranks.rank == 0:
        _log.warning("merged model: %s", merged.target)

    delete_older = partial(checkpoint.prune, place, 1, deep=False, passed_over=lambda other: other > step)
    on_first_rank(ranks, delete_older, where=place.uri)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedLora:
    """Result of an export."""

    source: str
    """Address of the checkpoint."""
    target: str
    step: int
    base: str | None
    """Base model that ``adapter_config.json`` names."""
    updates: int
    """Matrices with an update."""
    size_bytes: int


def export_lora(
    source: str,
    target: str,
    *,
    base_model: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
) -> ExportedLora:
    """Write the adapter as ``PeftModel.from_pretrained(base, target)`` reads it, with tokenizer and chat template.

    Args:
        source: a checkpoint, or the root of a run's checkpoints (the newest good one is taken).
        target: a directory that is empty or not there yet.
        base_model: what the files say of the base; None: the Hugging Face directory that the run began with, or whose
            import it began with, if any.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that the checkpoint keeps.
        trusted: files of public keys, one of which must have signed the checkpoint; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.

    Raises:
        NoAdapterHere: the run had none.
        HFExchangeUnsupported, NoPeftForm: transformers has no such model, or peft no form for it.
        HFNotWritable: ``target`` holds something.
    """
    directory = Path(target)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HFNotWritable(directory=target)
    resolved, keys = named_config(config, trusted)
    saved = open_saved(*locate(source, resolved), reads_base=False, config=resolved, trusted=keys)
    base, began = base_model, HFSource.of_facts(saved.manifest.facts.hf)
    if base is None and began is not None and not base_step(saved.manifest):  # an import has step 0; later ones trained
        base = began.path
    written, tensors = describe(build.model_builder(saved.run.config), saved.lora, saved.trained, base=base)
    if written["lora_dropout"] != saved.lora.lora_dropout:
        _log.warning(
            "adapter_config.json says lora_dropout 0: peft opens no experts with another one, nor layers of their names"
        )
    files, notes = tokenizer_files(saved.run, build.tokenizer(saved.run.config))
    for note in notes:
        _log.warning(note)
    size_bytes = write_peft(directory, written, tensors, saved.read, base=saved.manifest.facts.base, files=files)
    return ExportedLora(
        source=saved.uri,
        target=target,
        step=saved.manifest.step,
        base=base,
        updates=len(saved.updated),
        size_bytes=size_bytes,
    )
