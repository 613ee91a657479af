"""Merge of a checkpoint of a LoRA run into one of a plain model: ``nxdt checkpoint merge-lora``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointFacts, SavePlan, Signer, TrustedKeys, save
from nxdt_core.checkpoint.collective import on_first_rank, rank_of
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.shards import write_listed
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.write.plan import agree_on_assignment
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.protocols.piece import Box, Listing, ShardInfo, TensorKey
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.regular_files import make_directory, replace_text
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.weights.importing import check_empty, write_counters
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import MergeUnties
from nxdt_plugin_lora.peft_files import CONFIG, peft_config
from nxdt_plugin_lora.peft_names import base_of
from nxdt_plugin_lora.saved_run import SavedLora, open_saved
from nxdt_plugin_lora.targets import tables_of

_OF_THE_ADAPTER = ("adapter", "model_alignment_strategy")
"""Sections that a merged model's run has no more."""


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
    saved = open_saved(source, step, base=base, config=config, trusted=trusted)
    _check_ties(saved)
    held = _tensors_of(saved)

    def prepare() -> Listing:
        if rank_of(ranks) == 0:
            if not keep_others:
                check_empty(target)
            saved.check_base()
        return held

    def write(writer: AttemptWriter, mine: AbstractSet[TensorKey]) -> Mapping[TensorKey, TensorPart]:
        return _write(writer, saved, {name: held["model", name] for _, name in held if ("model", name) in mine}, ranks)

    uri = build.step_uri(target, saved.manifest.step)
    plan = SavePlan(
        step=saved.manifest.step,
        facts=_facts_without_adapter(saved.manifest.facts, elements=sum(each.box.elements for each in held.values())),
        assignment=agree_on_assignment(ranks, prepare, where=uri),
        write=write,
    )
    size_bytes = save(target, plan, ranks=ranks, signer=signer).size_bytes
    return Merged(source=saved.uri, target=uri, step=plan.step, merged=len(saved.updated), size_bytes=size_bytes)


def _tensors_of(saved: SavedLora) -> Listing:
    return {
        ("model", name): ShardInfo(dtype=spec.dtype, shape=spec.shape, box=Box.whole(spec.shape))
        for name, spec in saved.base.specs.items()
        if base_of(name) is None
    }


def _facts_without_adapter(facts: CheckpointFacts, *, elements: int) -> CheckpointFacts:
    config = {key: value for key, value in facts.config.items() if key not in _OF_THE_ADAPTER}
    return replace(facts, config=config, base="", without_base=False, fencing=0, keep="regular", elements=elements)


def merged_weight(
    weight: torch.Tensor, update: Mapping[str, torch.Tensor], config: LoraConfig, *, table: bool = False
) -> torch.Tensor:
    """``weight`` with its update, in its own dtype.

    Args:
        weight: [out, in], a table [rows, width], or of experts [experts, out, in].
        update: its parameters by kind.
        config: the resolved configuration of the run.
        table: whether it is one that is looked up.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = update["lora_A"].to(wide), update["lora_B"].to(wide)
    whole = weight.to(wide) + config.scaling * (down @ up if table else up @ down)
    if "lora_magnitude" in update:
        inputs = 0 if table else 1
        norms = torch.linalg.vector_norm(whole, dim=inputs, keepdim=True)
        whole = whole * (update["lora_magnitude"].to(wide).unsqueeze(inputs) / norms)
    return whole.to(weight.dtype)


def _write(
    writer: AttemptWriter, saved: SavedLora, held: Mapping[str, ShardInfo], ranks: RankAgreement | None
) -> dict[TensorKey, TensorPart]:
    updated, tables = saved.updated, tables_of(build.model_builder(saved.run.config))

    def read(names: Sequence[str]) -> Iterator[torch.Tensor]:
        frozen = saved.base.values([name for name in names if name not in saved.trained])
        needed = {name: [name] * (name in saved.trained) + [*updated.get(name, {}).values()] for name in names}
        own = saved.read([part for parts in needed.values() for part in parts])
        for name in names:
            weight = next(own if name in saved.trained else frozen)
            if name in updated:
                update = {kind: next(own) for kind in updated[name]}
                weight = merged_weight(weight, update, saved.lora, table=name in tables)
            yield weight.to(getattr(torch, held[name].dtype))

    rank = rank_of(ranks)
    written = write_listed(writer, "model", held, read, rank=rank)
    if rank == 0:
        facts = saved.manifest.facts
        train = TrainState(
            step=saved.manifest.step,
            consumed_samples=facts.consumed_samples,
            consumed_tokens=facts.consumed_tokens,
            updates=facts.updates,
        )
        write_counters(writer, train)
    return {("model", name): part for name, part in written.items()}


def _check_ties(saved: SavedLora) -> None:
    for owner, user in build.model_builder(saved.run.config).plan().tied:
        if {owner, user} & saved.updated.keys():
            raise MergeUnties(owner=owner, user=user)


MERGED = "-merged"
"""Suffix of the address of a run's checkpoints, under which the merged model is committed."""
_DIRECTORY = "lora_adapter"

_log = logging.getLogger(__name__)


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
        made = checkpoint.read_manifest(storage, step).created
        return step in merged and checkpoint.read_manifest(place, step).created > made

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

    def delete_older() -> list[int]:
        return checkpoint.prune(place, 1, deep=False, passed_over=lambda other: other > step)

    on_first_rank(ranks, delete_older, where=place.uri)
