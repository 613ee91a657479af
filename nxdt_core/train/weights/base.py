"""The frozen weights that a checkpoint of an adapter leaves out, from where its run took them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest, TrustedKeys
from nxdt_core.checkpoint.format.safetensors_stream import TensorSpec
from nxdt_core.checkpoint.formats import format_of, open_checkpoint
from nxdt_core.checkpoint.signing import refuse_foreign
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.models.random.init import draw, fresh_rules, rule_for
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.weights.frozen import digest_of, samples_of

__all__ = ["BaseWeights", "base_weights"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Whole parameters of a model, on the host."""

    origin: str
    """Where they come from, for messages."""
    specs: Mapping[str, TensorSpec]
    """Dtype and shape by global name."""
    read: Callable[[Sequence[str]], Iterator[torch.Tensor]]
    """Yields parameters by name, in order; all names in one call, so that each file is opened once."""

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
        manifest: of the checkpoint.
        base: address of a different base: a checkpoint or a directory of another program. None uses the checkpoint
            itself if it is complete, else the weights that its run began with: ``checkpoint.resume_from``, where its
            run recorded the step, or fresh weights.
        trusted: keys, one of which must have signed the base; None requires no signature.

    Raises:
        CheckpointNotFound, ForeignFormatUnknown: the base does not exist.
        CheckpointNotTrusted: it lacks a valid signature of one of the keys.
    """
    if base is None and not manifest.facts.without_base:
        return _of_checkpoint(storage, manifest)
    began = config.run.checkpoint
    named = base or (began.resume_from if began.weight_init_only else None)
    if named is None:
        return _fresh(build.model_builder(config), config.run.seed, build.precision(config).parameters)
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
    _, found = open_checkpoint(Path(path), config.kernel)
    listed = found.listing(build.model_builder(config)).items()
    specs = {name: TensorSpec(held.dtype, held.shape) for (section, name), held in listed if section == "model"}
    return BaseWeights(
        origin=f"'{path}'", specs=specs, read=lambda names: iter(found.read([("model", name) for name in names]))
    )


def _fresh(builder: ModelBuilder, seed: int, dtype: str) -> BaseWeights:
    with torch.device("meta"):
        users = {user for _, user in builder.plan().tied}
        named = builder.build().named_parameters(remove_duplicate=False)
        specs = {name: TensorSpec(dtype, tuple(p.shape)) for name, p in named if name not in users}
    rules = fresh_rules(builder, specs)

    def read(names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            yield draw(specs[name].shape, rule_for(name, rules), name=name, seed=seed, dtype=getattr(torch, dtype))

    return BaseWeights(origin=f"a fresh model of seed {seed}", specs=specs, read=read)
