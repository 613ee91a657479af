"""The frozen weights that a checkpoint of an adapter leaves out, from where its run took them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.shards import TensorSpec
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import meta_device
from nxdt_core.distributed.placement import piece_of
from nxdt_core.engine.weights import quantised_weights
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.models.quantised import QuantisedWeight, requantised
from nxdt_core.models.random.init import complete_init_rules, draw, rule_for
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.piece import Piece
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, TrustedKeys

__all__ = [
    "BaseWeights",
    "Sample",
    "base_digest",
    "base_weights",
    "digest_of",
    "load_weights",
    "samples_of",
    "trained_parameters",
    "without_base",
]

Sample = tuple[str, int, int]
"""Parameter, number of the sample, and the element's bits in bfloat16, which all dtypes of one model agree on."""

_digests: WeakKeyDictionary[ParallelModel, str] = WeakKeyDictionary()


def trained_parameters(model: ParallelModel) -> frozenset[str]:
    """Return the names of the parameters outside the frozen base: this rank's that train, and those that adapters
    added, frozen or not."""
    return model.added | {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def without_base(model: ParallelModel, weights: Mapping[str, torch.Tensor | Piece]) -> dict[str, torch.Tensor | Piece]:
    """Return those of ``weights`` that train or that adapters added."""
    trained = trained_parameters(model)
    return {name: weight for name, weight in weights.items() if name in trained}


def base_digest(model: ParallelModel, ranks: RankAgreement) -> str:
    """Digest of the frozen weights, equal on all ranks and in every layout. Collective; computed once a model, after
    its base has its weights."""
    known = _digests.get(model)
    if known is None:
        trained, held = trained_parameters(model), model.state_dict()
        names = [name for name, _ in model.named_parameters() if name not in trained]
        own = list(samples_of((name, held[name]) for name in names))
        known = _digests[model] = digest_of(chain.from_iterable(ranks.all_gather_object(own)))
    return known


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of samples, in any order, with repeated ones counted once."""
    text = "\n".join(f"{name}\0{number}\0{bits}" for name, number, bits in sorted(set(samples)))
    return hashlib.sha256(text.encode()).hexdigest()


def samples_of(weights: Iterable[tuple[str, torch.Tensor | Piece]]) -> Iterable[Sample]:
    """Return the samples in this rank's pieces; the host waits for the device once."""
    places: list[tuple[str, int]] = []
    found: list[torch.Tensor] = []
    for name, weight in weights:
        piece = piece_of(weight, name)
        for index, (number, local) in enumerate(piece.box.samples(piece.shape)):
            held = piece.tensor
            places.append((name, number))
            found.append(held.samples[index] if isinstance(held, QuantisedWeight) else held[local].detach().bfloat16())
    bits = torch.stack(found).view(torch.int16).tolist() if found else []
    return [(name, number, value) for (name, number), value in zip(places, bits, strict=True)]


_log = logging.getLogger(__name__)


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
        found = digest_of(sample for name, weight in weights for sample in samples_of([(name, weight)]))
        if found != digest:
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
    found, dtype = _found(config, storage, manifest, base, trusted), config.run.adapter.base_dtype
    if dtype is None:
        return found
    coded = quantised_weights(build.model_builder(config), build.adapters(config), build.precision(config), dtype)
    return replace(found, coded=coded)


def _found(
    config: ResolvedConfig, storage: CheckpointStore, manifest: Manifest, base: str | None, trusted: TrustedKeys | None
) -> BaseWeights:
    if base is None and not manifest.facts.without_base:
        return _of_checkpoint(storage, manifest)
    began = config.run.checkpoint
    named = base or (began.resume_from if began.weight_init_only else None)
    if named is None:
        return _fresh(build.model_builder(config), config.run.seed, build.precision(config).parameters)
    from nxdt_core.checkpoint.foreign import format_of
    from nxdt_core.checkpoint.signing import refuse_foreign

    if format_of(Path(named), config.kernel) is not None:
        refuse_foreign(trusted, named)
        return _foreign(named, config)
    found, step = checkpoint.locate(named, config.kernel)
    return _of_checkpoint(found, checkpoint.find_checkpoint(found, step, warn=_log.warning, trusted=trusted))


def _of_checkpoint(storage: CheckpointStore, manifest: Manifest) -> BaseWeights:
    index = manifest.tensors.get("model", {})
    specs = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in index.items()}
    return BaseWeights(
        origin=f"'{build.step_uri(storage, manifest.step)}'",
        specs=specs,
        read=lambda names: checkpoint.iterate_model(storage, manifest, names),
    )


def _foreign(path: str, config: ResolvedConfig) -> BaseWeights:
    from nxdt_core.checkpoint.foreign import open_checkpoint

    _, found = open_checkpoint(Path(path), config.kernel, fill_rows=bool(build.added_tokens(config)))
    listed = found.listing(build.model_builder(config)).items()
    specs = {name: TensorSpec(held.dtype, held.shape) for (section, name), held in listed if section == "model"}
    return BaseWeights(
        origin=f"'{path}'", specs=specs, read=lambda names: iter(found.read([("model", name) for name in names]))
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
) -> dict[str, torch.Tensor | Piece]:
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
    ranks, weights = engine.ranks, _expected(storage, manifest, engine, model, with_optimizer=with_optimizer)
    unmatched = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=strict, table_rows=table_rows
    )
    for names, fate in ((unmatched.missing, "keep their fresh values"), (unmatched.extra, "are left out")):
        if names and ranks.rank == 0:
            which = "that the checkpoint lacks" if names is unmatched.missing else "that the model lacks"
            _log.warning("%d parameters %s %s: %s", len(names), which, fate, listing(names))
    model.load_state_dict(weights, strict=False)  # whether names match was decided above
    return weights


def _expected(
    storage: CheckpointStore,
    manifest: Manifest,
    engine: ParallelEngine,
    model: ParallelModel,
    *,
    with_optimizer: bool,
) -> dict[str, torch.Tensor | Piece]:
    """The weights of ``model`` that the checkpoint fills: all; or those that train, where it has no others; or all but
    those that adapters added, where it has none of them."""
    weights = model.state_dict()
    if manifest.facts.without_base:
        if manifest.facts.base != base_digest(model, engine.ranks):
            raise AdapterOfAnotherBase(where=build.step_uri(storage, manifest.step), base="this run")
        return without_base(model, weights)
    if not with_optimizer and not model.added & manifest.tensors.get("model", {}).keys():
        return {name: weight for name, weight in weights.items() if name not in model.added}
    return weights
