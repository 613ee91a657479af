"""Weights that a user's address names: a run, a checkpoint, a directory of another program, or an adapter over one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxdt_core import checkpoint
from nxdt_core.checkpoint.format.hf_source import HFSource, read_hf_source
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.distributed.placement import piece_of
from nxdt_core.engine.weights import build_whole
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase, CheckpointNotFound
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import AdapterBaseUnknown
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.adapter import Adapter, SavedAdapter
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.piece import Box
from nxdt_core.train import build
from nxdt_core.train.weights.base import base_digest, base_weights, load_weights
from nxdt_core.train.weights.saved_config import locate, named_config, one_process_run, saved_run

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, TrustedKeys

__all__ = ["FoundWeights", "find_weights", "teacher_of", "teacher_run"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWeights:
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
) -> FoundWeights:
    """Return the weights that ``uri`` names, without reading them.

    Args:
        uri: the directory of a run, the address of its checkpoints or of one of them, a directory of another program
            such as Hugging Face's, or a directory with an adapter, such as peft's.
        base: address of the weights below an adapter, where they are not where it says.
        config: YAML file or ``recipe:NAME`` that decides in place of what is found.
        trusted: files of public keys, one of which must have signed what is loaded.

    Raises:
        AdapterBaseUnknown: an adapter whose base is not named by a path that exists, or is an adapter itself.
        NxdtError: what is wrong with the checkpoint or the directory.
    """
    from nxdt_core.checkpoint.foreign import recognise
    from nxdt_core.checkpoint.signing import refuse_foreign

    own, keys = named_config(config, trusted)
    kernel = Kernel.start() if own is None else own.kernel
    adapter = _adapter_at(Path(uri), kernel)
    if adapter is not None:
        refuse_foreign(keys, uri)
        return _adapted(find_weights(_base_of(uri, adapter, base, kernel), config=config, trusted=trusted), adapter)
    if recognise(Path(uri), kernel) is not None:
        refuse_foreign(keys, uri)
        return _foreign(uri, own, kernel)
    return _committed(uri, own, keys, base)


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
    found = _teacher(objective, config)
    objective.check_teacher(found.run, config)
    run = replace(found.run, run=found.run.run.changed(data=config.run.data))
    with build.plan_errors_named(run), _as_of_teacher():
        model = engine.initialize_model(
            build.model_builder(run),
            precision=build.precision(config),
            seed=config.run.seed,
            adapters=build.adapters(run),
            materialise=False,
            frozen=True,
        )
        found.load(engine, model)
    return model


@contextmanager
def _as_of_teacher() -> Iterator[None]:
    """Say in errors of a model that it is the teacher, and not the one that trains."""
    try:
        yield
    except NxdtError as error:
        error.happened = f"objective.teacher: {error.happened}"
        raise


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


def _teacher(objective: Objective, config: ResolvedConfig) -> FoundWeights:
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


def _committed(uri: str, own: ResolvedConfig | None, keys: TrustedKeys | None, base: str | None) -> FoundWeights:
    found, step = locate(uri, own)
    manifest = checkpoint.find_checkpoint(found, step, warn=_log.warning, trusted=keys)
    where = build.step_uri(found, manifest.step)
    saved = saved_run(manifest, where=where, config=own, base=base is None)
    if saved.config.components["adapter"] is not None:
        _check_added(saved.config, manifest)

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        if manifest.facts.without_base:
            below = base_weights(saved.config, found, manifest, base=base, trusted=keys)
            held = model.state_dict()
            for name, weight in zip(below.specs, below.read([*below.specs]), strict=True):
                if name in held:
                    piece = piece_of(held[name], name)
                    piece.tensor.copy_(weight[piece.box.within(Box.whole(piece.shape))])
            if base_digest(model, engine.ranks) != manifest.facts.base:
                raise AdapterOfAnotherBase(where=where, base=below.origin)
        load_weights(found, manifest, engine=engine, model=model)

    source = HFSource.of_facts(manifest.facts.hf)
    return FoundWeights(run=saved.config, chat_keys=saved.chat_keys, step=manifest.step, source=source, load=fill)


def _check_added(run: ResolvedConfig, manifest: Manifest) -> None:
    """Check what adapters add to the model, before it takes memory: their sections name the sizes.

    Raises:
        WeightsDoNotFit: the checkpoint has it in other shapes, or lacks it.
    """
    whole = build_whole(build.model_builder(run), build.adapters(run))
    added = {name: tuple(p.shape) for name, p in whole.module.named_parameters() if name in whole.added}
    saved = {name: entry.shape for name, entry in manifest.tensors.get("model", {}).items()}
    missing = sorted(added.keys() - saved.keys())
    wrong = [f"{n}: {saved[n]} instead of {shape}" for n, shape in added.items() if saved.get(n, shape) != shape]
    if missing or wrong:
        raise WeightsDoNotFit(missing=missing, extra=[], shapes=wrong)


def _foreign(path: str, own: ResolvedConfig | None, kernel: Kernel) -> FoundWeights:
    from nxdt_core.checkpoint.foreign import load_format_into, open_checkpoint
    from nxdt_core.train.weights.importing import described_run

    name, reader = open_checkpoint(Path(path), kernel)
    run, keys = described_run(path, name, reader), ChatKeys()
    if own is not None:
        saved = one_process_run(own)
        run, keys = saved.config, saved.chat_keys

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        weights = model.state_dict()
        given = {name: weight for name, weight in weights.items() if name not in model.added}
        fill_rows = bool(build.added_tokens(run))
        load_format_into(
            Path(path), build.model_builder(run), run.kernel, given, ranks=engine.ranks, fill_rows=fill_rows
        )
        model.load_state_dict(weights, strict=False)

    source = read_hf_source(Path(path)) if name == "hf" else None
    return FoundWeights(run=run, chat_keys=keys, step=reader.step, source=source, load=fill)


def _adapted(below: FoundWeights, adapter: SavedAdapter) -> FoundWeights:
    """Return the same weights with an adapter that is loaded over them."""
    section = dict(adapter.section(build.model_builder(below.run)))
    run = load({**below.run.to_dict(), "adapter": section}, kernel=below.run.kernel, label="the adapter")

    def fill(engine: ParallelEngine, model: ParallelModel) -> None:
        below.load(engine, model)
        for each in build.adapters(run):
            each.begin(model, run, engine.ranks)

    return replace(below, run=run, load=fill)


def _adapter_at(path: Path, kernel: Kernel) -> SavedAdapter | None:
    if not path.is_dir() or any(path.glob("step-*")):
        return None
    opened = (component.load_class(Adapter).saved_at(path) for component in kernel.registry.all("adapter"))
    return next((found for found in opened if found is not None), None)


def _base_of(uri: str, adapter: SavedAdapter, base: str | None, kernel: Kernel) -> str:
    found = adapter.base if base is None else base
    missing = base is None and not os.path.exists(found or "")  # no Path: it refuses long names
    if found is None or missing or _adapter_at(Path(found), kernel) is not None:
        raise AdapterBaseUnknown(where=uri, base=found, adapter=not missing)
    return found
