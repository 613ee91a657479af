"""Weights that a user's address names: a run, a checkpoint, a directory of another program, or an adapter over one; and
the frozen weights that a checkpoint of an adapter leaves out, from where its run took them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_all_ranks, on_this_rank
from nxdt_core.checkpoint.format.hf_source import HFSource, read_hf_source
from nxdt_core.checkpoint.format.shards import TensorSpec
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.config.hub import local_path
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.distributed.devices import meta_device
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.engine.weights import build_whole, quantised_weights
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase, CheckpointNotFound
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import AdapterBaseUnknown
from nxdt_core.kernel import Kernel
from nxdt_core.models.quantised import QuantisedWeight, requantised
from nxdt_core.models.random.init import complete_init_rules, draw, rule_for
from nxdt_core.protocols.adapter import Adapter, SavedAdapter
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.format import CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build
from nxdt_core.train.weights.saved_config import locate, named_config, one_process_run, saved_run

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, TrustedKeys


_log = logging.getLogger(__name__)

_COMPARED = 4096
"""Ids of two tokenizers that are compared, at most."""
_SPECIAL = 0.01
"""Share of ids that may differ."""

Sample = tuple[str, int, int]
"""Parameter, number of the sample, and the element's bits in bfloat16, which all dtypes of one model agree on."""

_digests: WeakKeyDictionary[ParallelModel, str] = WeakKeyDictionary()


def trained_parameters(model: ParallelModel) -> frozenset[str]:
    """Return the names of the parameters outside the frozen base: this rank's that train, and those that adapters
    added, frozen or not."""
    return model.added | {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def without_base(
    model: ParallelModel, weights: Mapping[str, torch.Tensor | LocalShard]
) -> dict[str, torch.Tensor | LocalShard]:
    """Return those of ``weights`` that train or that adapters added."""
    trained = trained_parameters(model)
    return {name: weight for name, weight in weights.items() if name in trained}


def base_digest(model: ParallelModel, ranks: RankAgreement) -> str:
    """Digest of the frozen weights, equal on all ranks and in every layout. Collective; computed once a model, after
    its base has its weights."""
    digest = _digests.get(model)
    if digest is None:
        trained, weights = trained_parameters(model), model.state_dict()
        names = [name for name, _ in model.named_parameters() if name not in trained]
        samples = list(samples_of((name, weights[name]) for name in names))
        digest = _digests[model] = digest_of(chain.from_iterable(ranks.all_gather_object(samples)))
    return digest


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of samples, in any order, with repeated ones counted once."""
    text = "\n".join(f"{name}\0{number}\0{bits}" for name, number, bits in sorted(set(samples)))
    return hashlib.sha256(text.encode()).hexdigest()


def samples_of(weights: Iterable[tuple[str, torch.Tensor | LocalShard]]) -> Iterable[Sample]:
    """Return the samples in this rank's shards; the host waits for the device once."""
    places: list[tuple[str, int]] = []
    values: list[torch.Tensor] = []
    for name, weight in weights:
        shard = local_shard_of(weight, name)
        tensor = shard.tensor
        for index, (number, local) in enumerate(shard.region.samples(shard.shape)):
            places.append((name, number))
            if isinstance(tensor, QuantisedWeight):
                values.append(tensor.samples[index])
            else:
                values.append(tensor[local].detach().bfloat16())
    bits = torch.stack(values).view(torch.int16).tolist() if values else []
    return [(name, number, value) for (name, number), value in zip(places, bits, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Whole parameters of a model, on the host."""

    origin: str
    """Source of the weights, for messages."""
    specs: Mapping[str, TensorSpec]
    """Dtype and shape by global name."""
    read: Callable[[Sequence[str]], Iterator[torch.Tensor]]
    """Yields parameters by name, in order; all names in one call, so that each file is opened once."""
    coded: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    """The forms, without memory, of those that the run quantises."""

    def values(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield parameters as :attr:`read` does, with the values that one process has trained over."""
        for name, weight in zip(names, self.read(names), strict=True):
            yield requantised(weight, self.coded[name]) if name in self.coded else weight

    def check(self, frozen: Sequence[str], digest: str, *, where: str) -> None:
        """Check that the parameters match ``digest``; reads all of ``frozen``.

        Raises:
            AdapterOfAnotherBase: they do not.
        """
        weights = zip(frozen, self.read(frozen), strict=True)
        computed = digest_of(sample for name, weight in weights for sample in samples_of([(name, weight)]))
        if computed != digest:
            raise AdapterOfAnotherBase(where=where, base=self.origin)


def base_weights(
    config: ResolvedConfig,
    storage: CheckpointStore,
    manifest: Manifest,
    *,
    base: str | None = None,
    trusted: TrustedKeys | None = None,
) -> BaseWeights:
    """Find the weights that ``manifest`` leaves out.

    Args:
        config: of the run that wrote the checkpoint, on one process
            (:func:`~nxdt_core.train.weights.saved_config.saved_run`).
        storage: the store that holds the checkpoint.
        manifest: the committed manifest of the checkpoint.
        base: address of a different base: a checkpoint or a directory of another program. None uses the checkpoint
            itself if it is complete, else the weights that its run began with: ``checkpoint.resume_from``, where its
            run recorded the step, or fresh weights.
        trusted: keys, one of which must have signed the base; None requires no signature.

    Raises:
        CheckpointNotFound, ForeignFormatUnknown: the base does not exist.
        CheckpointNotTrusted: it lacks a valid signature of one of the keys.
    """
    weights, dtype = _unquantised(config, storage, manifest, base, trusted), config.run.adapter.base_dtype
    if dtype is None:
        return weights
    coded = quantised_weights(build.model_builder(config), build.adapters(config), build.precision(config), dtype)
    return replace(weights, coded=coded)


def _unquantised(
    config: ResolvedConfig, storage: CheckpointStore, manifest: Manifest, base: str | None, trusted: TrustedKeys | None
) -> BaseWeights:
    if base is None and not manifest.facts.without_base:
        return _of_checkpoint(storage, manifest)
    began = config.run.checkpoint
    named = base or (began.resume_from if began.weight_init_only else None)
    if named is None:
        return _fresh(build.model_builder(config), config.run.seed, build.precision(config).parameters)
    from nxdt_core.checkpoint.foreign import format_of, open_checkpoint
    from nxdt_core.checkpoint.signing import refuse_foreign

    if format_of(Path(named), config.kernel) is not None:
        refuse_foreign(trusted, named)
        _, reader = open_checkpoint(Path(named), config.kernel, fill_rows=bool(build.added_tokens(config)))
        listed = reader.listing(build.model_builder(config)).items()
        return BaseWeights(
            origin=f"'{named}'",
            specs={name: TensorSpec(info.dtype, info.shape) for (section, name), info in listed if section == "model"},
            read=lambda names: iter(reader.read([("model", name) for name in names])),
        )
    store, step = checkpoint.locate(named, config.kernel)
    return _of_checkpoint(store, checkpoint.find_checkpoint(store, step, warn=_log.warning, trusted=trusted))


def _of_checkpoint(storage: CheckpointStore, manifest: Manifest) -> BaseWeights:
    index = manifest.tensors.get("model", {})
    specs = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in index.items()}
    return BaseWeights(
        origin=f"'{build.step_uri(storage, manifest.step)}'",
        specs=specs,
        read=lambda names: checkpoint.iterate_model(storage, manifest, names),
    )


def _fresh(builder: ModelBuilder, seed: int, dtype: str) -> BaseWeights:
    with meta_device():
        users = {user for _, user in builder.plan().tied}
        named = builder.build().named_parameters(remove_duplicate=False)
        specs = {name: TensorSpec(dtype, tuple(p.shape)) for name, p in named if name not in users}
    rules = complete_init_rules(builder, specs)

    def read(names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            yield draw(specs[name].shape, rule_for(name, rules), name=name, seed=seed, dtype=getattr(torch, dtype))

    return BaseWeights(origin=f"a fresh model of seed {seed}", specs=specs, read=read)


def load_weights(
    storage: CheckpointStore,
    manifest: Manifest,
    *,
    engine: ParallelEngine,
    model: ParallelModel,
    strict: bool = True,
    with_optimizer: bool = False,
    table_rows: int | None = None,
) -> dict[str, torch.Tensor | LocalShard]:
    """Replace the weights of ``model`` by those of a checkpoint. Collective.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint to load.
        engine: the parallel engine that has laid out ``model``.
        model: the parallel model, in its layout.
        strict: refuse a checkpoint that lacks parameters of the model or has others; otherwise what it lacks stays as
            it is, what else it has is left out, and a warning names both.
        with_optimizer: whether optimizer state will be loaded, too. Without it, a checkpoint may lack what adapters
            added to the model.
        table_rows: as in :func:`~nxdt_core.checkpoint.load_model_into`.

    Returns:
        What was loaded, by name.

    Raises:
        AdapterOfAnotherBase: it leaves out what is frozen, and that is something else here.
        WeightsDoNotFit: names or shapes differ.
    """
    ranks, weights = engine.ranks, model.state_dict()
    if manifest.facts.without_base:
        if manifest.facts.base != base_digest(model, ranks):
            raise AdapterOfAnotherBase(where=build.step_uri(storage, manifest.step), base="this run")
        weights = without_base(model, weights)
    elif not with_optimizer and not model.added & manifest.tensors.get("model", {}).keys():
        weights = {name: weight for name, weight in weights.items() if name not in model.added}
    missing, extra = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict, table_rows=table_rows
    )
    lacking = "that the checkpoint lacks keep their fresh values", "that the model lacks are left out"
    for names, which in zip((missing, extra), lacking, strict=True):
        if names and ranks.rank == 0:
            _log.warning("%d parameters %s: %s", len(names), which, listing(names))
    model.load_state_dict(weights, strict=False)  # whether names match was decided above
    return weights


def load_foreign(
    path: Path, *, config: ResolvedConfig, engine: ParallelEngine, model: ParallelModel, strict: bool = True
) -> None:
    """Replace the weights of ``model``, but for what adapters added, by those of another program's checkpoint, in any
    layout. A rank reads those that it holds a part of, one at a time. Collective.

    Args:
        path: checkpoint of another program, in an installed format.
        config: of the run.
        engine: the parallel engine that has laid out ``model``.
        model: the parallel model, in its layout.
        strict: refuse a checkpoint that lacks parameters of the model or has others.

    Raises:
        ForeignFormatUnknown: nothing there is recognised.
        WeightsDoNotFit: its weights are not those of the model; nothing was read.
    """
    from nxdt_core.checkpoint.foreign import open_checkpoint
    from nxdt_core.checkpoint.read.load import check_model

    builder, fill_rows, ranks = build.model_builder(config), bool(build.added_tokens(config)), engine.ranks
    weights = {name: weight for name, weight in model.state_dict().items() if name not in model.added}

    def look() -> tuple[CheckpointReader, Mapping[str, TensorEntry]]:
        _, reader = open_checkpoint(path, config.kernel, fill_rows=fill_rows)
        listed = reader.listing(builder, weights_only=True).items()
        model_tensors = {name: info for (section, name), info in listed if section == "model"}
        return reader, {name: TensorEntry(dtype=i.dtype, shape=i.shape) for name, i in model_tensors.items()}

    reader, index = on_this_rank(ranks, look, where=str(path))
    missing, extra = check_model(index, weights, ranks, strict=False)
    if missing or extra:
        if strict:
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[], saved=[])
        text = "%s: parameters that it lacks keep their fresh values: %s; those that the model lacks are left out: %s"
        _log.warning(text, path, ", ".join(missing) or "none", ", ".join(extra) or "none")

    def fill() -> None:
        names = [name for name in index if name in weights]
        due = reader.read([("model", name) for name in names])
        for name in names:
            shard = local_shard_of(weights[name], name)
            with torch.no_grad():
                shard.tensor.copy_(next(due)[shard.region.within(TensorSlice.whole(shard.shape))])

    on_all_ranks(ranks, fill, where=str(path))
    model.load_state_dict(weights, strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Weights, and the run to use them with."""

    run: ResolvedConfig
    """Configuration of the run, on one process."""
    chat_keys: ChatKeys
    """Settings by which messages become text."""
    step: int
    """Optimizer steps that the weights have seen; 0 where a directory does not say."""
    source: HFSource | None
    """The Hugging Face directory that they came from."""
    load: Callable[[ParallelEngine, ParallelModel], None]
    """Fills a model of the run."""


def find_weights(
    uri: str, *, base: str | None = None, config: str | None = None, trusted: Sequence[str] = ()
) -> WeightSource:
    """Return the weights that ``uri`` names, without reading them.

    Args:
        uri: the directory of a run, the address of its checkpoints or of one of them, a directory of another program
            such as Hugging Face's, a model of the hub (``hf:owner/name``), or a directory with an adapter, such as
            peft's.
        base: address of the weights below an adapter, where they are not where it says.
        config: YAML file or ``recipe:NAME`` that decides in place of what is found.
        trusted: files of public keys, one of which must have signed what is loaded.

    Raises:
        AdapterBaseUnknown: an adapter whose base is not named by a path that exists, or is an adapter itself.
        NxdtError: what is wrong with the checkpoint or the directory.
    """
    from nxdt_core.checkpoint.foreign import recognise
    from nxdt_core.checkpoint.signing import refuse_foreign

    named, keys = named_config(config, trusted)
    uri, base = local_path(uri), local_path(base) if base else None
    kernel = Kernel.start() if named is None else named.kernel
    adapter = _adapter_at(Path(uri), kernel)
    if adapter is not None:
        refuse_foreign(keys, uri)
        base_uri = adapter.base if base is None else base
        missing = base is None and not os.path.exists(base_uri or "")  # no Path: it refuses long names
        if base_uri is None or missing or _adapter_at(Path(base_uri), kernel) is not None:
            raise AdapterBaseUnknown(where=uri, base=base_uri, adapter=not missing)
        return _adapted(find_weights(base_uri, config=config, trusted=trusted), adapter)
    if recognise(Path(uri), kernel) is not None:
        refuse_foreign(keys, uri)
        return _foreign_weights(uri, named, kernel)
    return _committed(uri, named, keys, base)


def teacher_of(objective: Objective, config: ResolvedConfig, engine: ParallelEngine) -> ParallelModel:
    """Return the teacher of an objective in the layout and the precision of the run of ``config``, forward only.
    Collective.

    Args:
        objective: names the teacher.
        config: of the run.
        engine: started.

    Raises:
        SequenceTooLongForModel: positions of the teacher end before the run's sequences do.
        WeightsDoNotFit: names or shapes differ.
        NxdtError: what is wrong with the checkpoint or the directory, or what the objective finds.
    """
    teacher = _teacher(objective, config)
    objective.check_teacher(teacher.run, config)
    run = replace(teacher.run, run=teacher.run.run.changed(data=config.run.data))
    with build.plan_errors_named(run):
        try:
            model = engine.initialize_model(
                build.model_builder(run),
                precision=build.precision(config),
                seed=config.run.seed,
                adapters=build.adapters(run),
                materialise=False,
                frozen=True,
            )
            teacher.load(engine, model)
        except NxdtError as error:  # say that it is not of the model that trains
            error.happened = f"{objective.teacher_key}: {error.happened}"
            raise
    return model


def known_tokenizer(config: ResolvedConfig) -> Tokenizer | None:
    """Return the run's tokenizer; None where it names none that can be read here."""
    try:
        return build.tokenizer(config)
    except NxdtError:  # such as one whose file is on another machine
        return None


def same_tokens(one: Tokenizer | None, other: Tokenizer | None) -> bool:
    """Return whether ids mean the same tokens, as far as is known. Digests of one tokenizer differ by the program that
    wrote its files; and a few tokens may be special in one of two."""
    if one is None or other is None or one.fingerprint() == other.fingerprint():
        return True
    size = min(one.vocab_size, other.vocab_size)
    ids = range(0, size, -(-size // _COMPARED))
    return sum(one.decode([id_]) != other.decode([id_]) for id_ in ids) <= _SPECIAL * len(ids)


def teacher_run(objective: Objective, config: ResolvedConfig) -> ResolvedConfig:
    """Return the run of an objective's teacher on one process; where ``teacher_config`` describes it, without its
    weights.

    Raises:
        NxdtError: as of :func:`teacher_of`.
    """
    if objective.teacher_config is None:
        run = _teacher(objective, config).run
    else:
        run = one_process_run(load(objective.teacher_config)).config
    objective.check_teacher(run, config)
    return run


def _teacher(objective: Objective, config: ResolvedConfig) -> WeightSource:
    trusted, described = config.run.checkpoint.sign.trusted, objective.teacher_config
    assert objective.teacher is not None  # as of every objective whose teacher is asked for
    try:
        return find_weights(objective.teacher, config=described, trusted=trusted)
    except CheckpointNotFound as error:
        if described is None:
            raise
        key = "checkpoint.uri" if "://" in objective.teacher else "exp_manager.explicit_log_dir"
        train = f"objective.teacher is trained by 'nxdt train {described} {key}={objective.teacher}'"
        raise CheckpointNotFound(where=error.where, reason=f"{error.reason}. {train}") from None


def _committed(uri: str, named: ResolvedConfig | None, keys: TrustedKeys | None, base: str | None) -> WeightSource:
    store, step = locate(uri, named)
    manifest = checkpoint.find_checkpoint(store, step, warn=_log.warning, trusted=keys)
    where = build.step_uri(store, manifest.step)
    saved = saved_run(manifest, where=where, config=named, base=base is None)
    if saved.config.components["adapter"] is not None:
        # What adapters add is checked before it takes memory: their sections name the sizes.
        whole = build_whole(build.model_builder(saved.config), build.adapters(saved.config))
        added = {name: tuple(p.shape) for name, p in whole.module.named_parameters() if name in whole.added}
        shapes = {name: entry.shape for name, entry in manifest.tensors.get("model", {}).items()}
        missing = sorted(added.keys() - shapes.keys())
        wrong = [f"{n}: {shapes[n]} instead of {shape}" for n, shape in added.items() if shapes.get(n, shape) != shape]
        if missing or wrong:
            raise WeightsDoNotFit(missing=missing, extra=[], shapes=wrong)

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        if manifest.facts.without_base:
            below = base_weights(saved.config, store, manifest, base=base, trusted=keys)
            targets = model.state_dict()
            for name, weight in zip(below.specs, below.read([*below.specs]), strict=True):
                if name in targets:
                    shard = local_shard_of(targets[name], name)
                    shard.tensor.copy_(weight[shard.region.within(TensorSlice.whole(shard.shape))])
            if base_digest(model, engine.ranks) != manifest.facts.base:
                raise AdapterOfAnotherBase(where=where, base=below.origin)
        load_weights(store, manifest, engine=engine, model=model)

    source = HFSource.of_facts(manifest.facts.hf)
    return WeightSource(run=saved.config, chat_keys=saved.chat_keys, step=manifest.step, source=source, load=fill)


def _foreign_weights(path: str, named: ResolvedConfig | None, kernel: Kernel) -> WeightSource:
    from nxdt_core.checkpoint.foreign import open_checkpoint
    from nxdt_core.train.weights.importing import described_run

    name, reader = open_checkpoint(Path(path), kernel)
    run, keys = described_run(path, name, reader), ChatKeys()
    if named is not None:
        saved = one_process_run(named)
        run, keys = saved.config, saved.chat_keys

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        load_foreign(Path(path), config=run, engine=engine, model=model)

    source = read_hf_source(Path(path)) if name == "hf" else None
    return WeightSource(run=run, chat_keys=keys, step=reader.step, source=source, load=fill)


def _adapted(below: WeightSource, adapter: SavedAdapter) -> WeightSource:
    """Return the same weights with an adapter that is loaded over them."""
    section = dict(adapter.section(build.model_builder(below.run)))
    run = load({**below.run.to_dict(), "adapter": section}, kernel=below.run.kernel, label="the adapter")

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        below.load(engine, model)
        for built in build.adapters(run):
            built.begin(model, run, engine.ranks)

    return replace(below, run=run, load=fill)


def _adapter_at(path: Path, kernel: Kernel) -> SavedAdapter | None:
    if not path.is_dir() or any(path.glob("step-*")):
        return None
    opened = (component.load_class(Adapter).saved_at(path) for component in kernel.registry.all("adapter"))
    return next((adapter for adapter in opened if adapter is not None), None)
