"""From a checkpoint of another program to a committed one of ours, tensor by tensor: ``nxdt checkpoint import``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointFacts
from nxdt_core.checkpoint.collective import on_this_rank, rank_of
from nxdt_core.checkpoint.foreign import open_checkpoint
from nxdt_core.checkpoint.format.hf_source import HFSource, read_hf_source
from nxdt_core.checkpoint.write.save import Planner, SavePlan, encode_state
from nxdt_core.config import Origin, ResolvedConfig, load
from nxdt_core.config.hub import local_path
from nxdt_core.config.tree import Tree
from nxdt_core.errors.base import listing as enumeration
from nxdt_core.errors.checkpoints import ForeignConfigMissing, ForeignSourceIsAddress, ImportPlaceTaken
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.format import CheckpointReader
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import Listing
from nxdt_core.train import build
from nxdt_core.train.state import TrainState, versions_of
from nxdt_core.train.weights.saved_config import ONE_PROCESS, config_to_save

_LONGEST = 4096
"""Tokens of a sequence in a derived configuration, where the model has no smaller bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Result of an import, which is committed."""

    source: str
    format: str
    target: str
    """Address of the checkpoint."""
    step: int
    model: str
    """Name of the model's component."""
    tensors: int
    size_bytes: int
    notes: tuple[str, ...] = ()
    """Parts of the source that the checkpoint does not keep, a sentence each."""


def import_checkpoint(
    source: str,
    target: str,
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    format: str | None = None,
    weights_only: bool = False,
    ranks: RankAgreement | None = None,
) -> Imported:
    """Commit a checkpoint of another program as one of ours, from which runs start and ``nxdt generate`` speaks.

    Each rank holds one tensor at a time. Collective: it succeeds on all ranks or fails on all.

    Args:
        source: a path that an installed checkpoint format recognises, or a model of the Hugging Face hub
            (``hf:owner/name``).
        target: address of a store without checkpoints.
        config: YAML file or ``recipe:NAME`` of the model; None takes what the source says of itself.
        overrides: ``key.path=value`` each, over ``config`` or what the source says.
        format: name of the format; None recognises it.
        weights_only: leave out the optimizer's state; without it, state that is not whole is an error. A checkpoint of
            weights alone has the step 0.
        ranks: that divide the tensors; None for a process that is alone.

    Raises:
        ForeignFormatUnknown: nothing there is recognised.
        ForeignConfigMissing: the source does not say which model it is, and ``config`` is None.
        ArchitectureUnread, ConfigError: no plugin builds its model.
        WeightsDoNotFit: its weights are not those of the model.
        ImportPlaceTaken: ``target`` holds a checkpoint.
        ForeignSourceIsAddress: ``source`` is not a path.
    """
    if "://" in source:
        raise ForeignSourceIsAddress(path=source)
    storage = checkpoint.open_storage(target)
    path = local_path(source)

    def open_source() -> tuple[str, CheckpointReader, ResolvedConfig, Listing, HFSource | None]:
        run = load(config, overrides) if config else None
        kernel = Kernel.start() if run is None else run.kernel
        fill_rows = run is not None and bool(build.added_tokens(run))
        name, reader = open_checkpoint(Path(path), kernel, format, fill_rows=fill_rows)
        if run is None:
            run = described_run(path, name, reader, overrides)
        elif (base := run.run.checkpoint.resume_from) is not None:
            reader.base = lambda: open_checkpoint(Path(base), kernel)[1]
        if rank_of(ranks) == 0:
            check_empty(storage)
        listing = reader.listing(build.model_builder(run), weights_only=weights_only)
        hf = read_hf_source(Path(path)) if name == "hf" else None
        return name, reader, run, listing, hf

    name, reader, run, listing, hf = on_this_rank(ranks, open_source, where=source)
    train = TrainState()
    if any(section == "optim" for section, _ in listing):  # else no run can resume at a later step
        train = TrainState(step=reader.step, consumed_samples=reader.consumed_samples)
    where = build.step_uri(storage, train.step)
    assignment = Planner(ranks).plan(lambda: listing, where=where)
    facts = CheckpointFacts(
        consumed_samples=train.consumed_samples,
        config=config_to_save(run),
        plugin_fingerprint=run.kernel.fingerprint(),
        versions=versions_of(run.kernel),
        hf={} if hf is None else hf.facts(),
    )
    state = encode_counters(train) if rank_of(ranks) == 0 else None
    plan = SavePlan(step=train.step, facts=facts, assignment=assignment, read=reader.read, state=state)
    manifest = checkpoint.save(storage, plan, ranks=ranks, signer=build.signer(run))
    left_out = () if hf is None else hf.left_out
    return Imported(
        source=source,
        format=name,
        target=where,
        step=train.step,
        model=run.selected("model").component.record.name,
        tensors=sum(map(len, manifest.tensors.values())),
        size_bytes=manifest.size_bytes,
        notes=(f"not in the checkpoint: {enumeration(left_out)}",) if left_out else (),
    )


def encode_counters(train: TrainState) -> bytes:
    """Return the state of rank 0 for a checkpoint that no training run has saved: counters alone."""
    return encode_state({"train": train.to_dict(), "rng": {}, "extra": {}}, 0)[0]


def described_run(source: str, format: str, reader: CheckpointReader, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Return a run without data, of the model that a checkpoint of another program describes.

    Raises:
        ForeignConfigMissing: it does not.
        ArchitectureUnread, ConfigError: no plugin builds its model.
    """
    keys = reader.model_config()
    if keys is None:
        raise ForeignConfigMissing(path=source, format=format)
    origin = Origin(kind="file", where=source)
    values = Tree.of(ONE_PROCESS, origin)
    for path, value in {"name": Path(source).absolute().name, "data.seq_length": 1, **keys}.items():
        values.set(path, value, origin)
    described = load(values.data, overrides, label=source)
    written = described.to_dict()
    bounds = (build.model_builder(described).max_sequence_length, written["model"].get("max_position_embeddings"))
    length = min(_LONGEST, *(bound for bound in bounds if bound is not None))
    written["model"]["model_config"] = None  # its values are in the configuration now; the file may be deleted
    return load(written, [f"data.seq_length={length}", *overrides], label=source)


def check_empty(storage: CheckpointStore) -> None:
    """Refuse a store that holds a committed or damaged checkpoint.

    Raises:
        ImportPlaceTaken: it holds one.
    """
    for status in checkpoint.list_checkpoints(storage):
        if status.state != "unfinished":
            raise ImportPlaceTaken(uri=storage.uri, step=status.step)
