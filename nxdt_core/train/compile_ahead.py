"""A trial of a run that builds all of its graphs and leaves nothing of itself: what ``nxdt compile`` calls."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.sampler import first_batches
from nxdt_core.protocols.dataset import MapDataset
from nxdt_core.protocols.engine import CompileAhead, GraphOrigins, ParallelEngine
from nxdt_core.train.data import Dataset, StepInput
from nxdt_core.train.session import TrainSession
from nxdt_core.train.step import mean_loss, start_engine, without_gradients

_STEPS = 3
"""The first one compiles; the second has an optimizer's state, and the third begins with what the second changed."""


def ahead_of(config: ResolvedConfig) -> CompileAhead:
    """Return how the run's engine compiles ahead.

    Raises:
        EngineCannotCompileAhead: it does not.
        NxdtError: the run compiles nothing, or the cache cannot be written.
    """
    return config.selected("engine").component.load_class(ParallelEngine).compile_ahead(config)


def run_trial(config: ResolvedConfig, ahead: CompileAhead, say: Callable[[str], None]) -> GraphOrigins | None:
    """Train for a few steps and validate, with fresh weights, on each rank of a run. Collective.

    It reads the run's data, and neither its checkpoints nor its directory.

    Args:
        config: the resolved configuration of the run.
        ahead: how the run's engine compiles ahead.
        say: prints a line; called on rank 0.

    Returns:
        Where the graphs of all ranks came from; None where a tool compiles them after the trial.
    """
    engine, run = TrainSession(config).engine, config.run
    start_engine(config, engine)
    directory = Path(tempfile.gettempdir(), engine.ranks.broadcast_object(f"nxdt-compile-{uuid.uuid4().hex}"))
    session = TrainSession(
        replace(
            config,
            run=run.changed(
                trainer=run.trainer.changed(max_steps=_STEPS),
                checkpoint=run.checkpoint.changed(enabled=False, resume_if_exists=False, resume_from=None),
            ),
            loggers=(),
            run_dir=directory,
        ),
        engine=engine,
    )
    try:
        session.build_model()
        session.build_optimizer()
        ranks, parts = engine.ranks, {}
        for name, work in (("training", _train), ("validation", _validate)):
            before = _count(ahead)
            work(session)
            parts[name] = sum(ranks.all_gather_object(_count(ahead) - before), GraphOrigins())
            if ranks.rank == 0:
                say(f"{name}: {parts[name]}" if ahead.origins is not None else f"{name}: traced")
        ranks.barrier()  # other processes of the machine may still read what is in the directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    session.close()  # not after an error: other ranks may be stuck in a collective
    return None if ahead.origins is None else sum(parts.values(), GraphOrigins())


def _train(session: TrainSession) -> None:
    def first(dataset: Dataset, split: str) -> Dataset:
        size = session.config.run.data.global_batch_size
        return first_batches(dataset, _STEPS, size) if isinstance(dataset, MapDataset) else dataset

    if session.objective.traits.reference == "before":  # log-probabilities of a whole dataset take hours
        session.data.replace_datasets(first)
    for batch in session.batches():
        float(session.step(batch).loss.loss)  # as a run's log does; devices that record operations then run them


def _validate(session: TrainSession) -> None:
    trainer = session.config.run.trainer
    if trainer.val_check_interval is None:
        return
    limit = trainer.limit_val_batches if isinstance(trainer.limit_val_batches, int) else None
    with without_gradients(inference=trainer.inference_mode), session.validated_weights():
        for loader in session.validation_loaders():
            mean_loss(session.evaluate_batch(batch) for batch in _first_and_last(islice(loader, limit)))


def _first_and_last(batches: Iterable[StepInput]) -> Iterator[StepInput]:
    """Yield the first batch and the last one, which may be smaller."""
    last = None
    for number, batch in enumerate(batches):
        if number == 0:
            yield batch
        else:
            last = batch
    if last is not None:
        yield last


def _count(ahead: CompileAhead) -> GraphOrigins:
    return GraphOrigins() if ahead.origins is None else ahead.origins()
