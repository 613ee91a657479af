"""Start of a run: at step 0, from the newest good checkpoint, or from one that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_first_rank
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.hub import complete
from nxdt_core.config.sources import expand_home
from nxdt_core.errors.checkpoints import BaseDtypeChanged, ForeignHasWeightsOnly
from nxdt_core.errors.training import (
    LengthUnknown,
    NoCheckpointToResume,
    PluginVersionChanged,
    RunAlreadyHasCheckpoints,
)
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.weights.saved_config import base_step, saved_adapter

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint that a run begins with."""

    storage: CheckpointStore
    manifest: Manifest
    weights_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStart:
    """Weights of another program that a run begins with."""

    path: Path


def may_resume(config: ResolvedConfig, ranks: RankAgreement) -> bool:
    """Return whether there may be something to load, without a look into a store. Collective."""
    wanted, uri = config.run.checkpoint, config.checkpoint_uri
    if not wanted.resume_if_exists or wanted.resume_from is not None:
        return wanted.resume_from is not None
    if not wanted.resume_ignore_no_checkpoint or "://" in uri:
        return True
    return ranks.broadcast_object(expand_home(uri).exists())


def decide_start(
    config: ResolvedConfig, own: CheckpointStore, say: Callable[[str], None], ranks: RankAgreement | None = None
) -> Start | ForeignStart | None:
    """Decide what to load; None starts at step 0.

    Collective, with one answer: no rank may start from what another rank finds damaged or missing.

    Args:
        config: its section ``checkpoint`` says what is wanted.
        own: the run's store.
        say: prints a line about what is skipped.
        ranks: for collectives over all processes; None in a run of one process.

    Raises:
        RunAlreadyHasCheckpoints: a new run would mix with an older one's checkpoints.
        NoCheckpointToResume: a resume was requested, and there is nothing good to resume from.
        ForeignHasWeightsOnly: a resume from a checkpoint of another program was requested.
        CheckpointNotTrusted: it lacks a valid signature of one of ``checkpoint.sign.trusted``.
    """
    from nxdt_core.checkpoint.read.status import newest_first

    wanted = config.run.checkpoint
    if wanted.resume_if_exists:
        newest = checkpoint.latest(own, warn=say, ranks=ranks, trusted=build.trusted_keys(config))
        if newest is not None:
            return Start(storage=own, manifest=newest, weights_only=False)
    elif wanted.enabled:
        committed = (status.step for status in newest_first(own) if status.state == "committed")
        newest_step = on_first_rank(ranks, lambda: next(committed, None), where=own.uri)
        if newest_step is not None:
            raise RunAlreadyHasCheckpoints(uri=own.uri, step=newest_step)
    if wanted.resume_from is not None:
        return _named(config, wanted.resume_from, say, ranks)
    if wanted.resume_if_exists and not wanted.resume_ignore_no_checkpoint:
        raise NoCheckpointToResume(uri=own.uri)
    return None


def check_adapter(config: ResolvedConfig, start: Start) -> None:
    """Check that the weights of ``start`` compute the same under this run's adapter as under that of the run that saved
    them.

    Raises:
        NxdtError: they do not.
    """
    where = build.step_uri(start.storage, start.manifest.step)
    saved, own = saved_adapter(start.manifest, config), config.run.adapter
    before = saved.get("base_dtype")
    if not start.weights_only and saved.get("name") is not None and before != own.base_dtype:
        raise BaseDtypeChanged(where=where, saved=before or "null", found=own.base_dtype or "null")
    for adapter in build.adapters(config):
        adapter.check_resume(saved, where)


def check_versions(config: ResolvedConfig, start: Start, say: Callable[[str], None]) -> None:
    """Compare the plugins of the model and the optimizer with those that wrote the checkpoint of ``start``.

    Raises:
        PluginVersionChanged: one has another version, and ``plugins.on_resume`` is ``refuse``.
    """
    before, seen = start.manifest.facts.versions, set[str]()
    for slot in ("model", "optimizer"):
        component = config.selected(slot).component
        saved = before.get(component.dist)
        if saved is None or saved == component.version or component.dist in seen:
            continue
        seen.add(component.dist)
        if config.run.plugins.on_resume == "refuse":
            where = build.step_uri(start.storage, start.manifest.step)
            raise PluginVersionChanged(where=where, dist=component.dist, saved=saved, found=component.version)
        say(f"{component.dist} has version {component.version}, and {saved} wrote the checkpoint")


def decide_base(
    config: ResolvedConfig, start: Start, say: Callable[[str], None], ranks: RankAgreement | None = None
) -> Start | ForeignStart | None:
    """Return where the weights are that the checkpoint of ``start`` leaves out; None where it has all, or they were
    drawn. Of a store, the step that the run began with. Collective."""
    wanted = config.run.checkpoint
    if not start.manifest.facts.without_base or wanted.resume_from is None or not wanted.weight_init_only:
        return None
    return _named(config, wanted.resume_from, say, ranks, base_step(start.manifest))


def with_start_step(config: ResolvedConfig, began: Start | ForeignStart | None) -> ResolvedConfig:
    """Return the configuration that the run's checkpoints keep: with the step of ``began`` in
    ``checkpoint.resume_from``, where that names the root of a store, whose newest step is another one later."""
    wanted = config.run.checkpoint
    if not isinstance(began, Start) or not began.weights_only or wanted.resume_from is None:
        return config
    if build.locate(config, wanted.resume_from)[1] is not None:
        return config
    uri, key = f"{wanted.resume_from.rstrip('/')}/{step_name(began.manifest.step)}", "checkpoint.resume_from"
    shown, tree = config.tree.shown_at(key), config.tree.copy()
    kept = f"{shown.rstrip('/')}/{step_name(began.manifest.step)}" if shown else None
    tree.set(key, uri, tree.origin(key), kept)
    return replace(config, run=config.run.changed(checkpoint=wanted.changed(resume_from=uri)), tree=tree)


def _named(
    config: ResolvedConfig, uri: str, say: Callable[[str], None], ranks: RankAgreement | None, began: int | None = None
) -> Start | ForeignStart:
    from nxdt_core.checkpoint.foreign import format_of, open_checkpoint
    from nxdt_core.checkpoint.signing import refuse_foreign

    complete(uri)  # on each host, and not while others wait in a collective
    weights_only, trusted = config.run.checkpoint.weight_init_only, build.trusted_keys(config)
    format = on_first_rank(ranks, lambda: format_of(Path(uri), config.kernel), where=uri)
    if format is not None:
        if not weights_only:
            raise ForeignHasWeightsOnly(path=uri, format=format)
        refuse_foreign(trusted, uri)

        def check_fits() -> None:  # names and shapes, before the run takes memory for the model
            _, reader = open_checkpoint(Path(uri), config.kernel, fill_rows=bool(build.added_tokens(config)))
            reader.listing(build.model_builder(config), weights_only=True)

        on_first_rank(ranks, check_fits, where=uri)
        return ForeignStart(path=Path(uri))
    storage, step = build.locate(config, uri)
    wanted = began if step is None else step
    manifest = checkpoint.find_checkpoint(storage, wanted, warn=say, ranks=ranks, trusted=trusted)
    return Start(storage=storage, manifest=manifest, weights_only=weights_only)


def counts_epochs(config: ResolvedConfig) -> bool:
    """Return whether a setting of the run is given in passes over the data."""
    trainer, saves = config.run.trainer, config.run.checkpoint.every_n_epochs
    passes = (trainer.max_epochs, trainer.min_epochs, trainer.check_val_every_n_epoch, saves)
    return any(count is not None and count > 0 for count in passes)


def epochs_to_steps(config: ResolvedConfig, samples: int | None) -> ResolvedConfig:
    """Return the configuration with ``max_epochs``, ``min_epochs``, ``check_val_every_n_epoch`` and ``every_n_epochs``
    as steps.

    Passes follow each other without a gap, so that one may end within a step; n passes are the whole steps in them.

    Args:
        config: the resolved configuration of the run.
        samples: in the training data; None where they do not know.

    Raises:
        LengthUnknown: a setting counts passes over such data.
    """
    run, trainer = config.run, config.run.trainer

    def steps(key: str, passes: int | None) -> int | None:
        if passes is None or passes < 1:
            return None
        if samples is None:
            raise LengthUnknown(key=key)
        return max(1, passes * samples // run.data.global_batch_size)

    end = steps("trainer.max_epochs", trainer.max_epochs)
    last = trainer.max_steps if end is None else min(end, trainer.max_steps)
    least = steps("trainer.min_epochs", trainer.min_epochs)
    validation = steps("trainer.check_val_every_n_epoch", trainer.check_val_every_n_epoch)
    save = steps("checkpoint.every_n_epochs", run.checkpoint.every_n_epochs)
    sched = run.model.optim.sched
    if sched.max_steps == trainer.max_steps:
        sched = sched.changed(max_steps=last)
    return replace(
        config,
        run=run.changed(
            trainer=trainer.changed(
                max_steps=last,
                min_steps=max(trainer.min_steps or 0, least or 0),
                val_check_interval=validation or trainer.val_check_interval,
            ),
            checkpoint=run.checkpoint.changed(every_n_train_steps=save or run.checkpoint.every_n_train_steps),
            model=run.model.changed(optim=run.model.optim.changed(sched=sched)),
        ),
    )


def apply_fast_dev_run(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of the trial where it asks for one, else itself. Learning rates are those of the run."""
    run, steps = config.run, int(config.run.trainer.fast_dev_run)
    if not steps:
        return config
    return replace(
        config,
        run=run.changed(
            trainer=run.trainer.changed(
                max_steps=steps,
                max_epochs=-1,
                val_check_interval=steps,
                check_val_every_n_epoch=None,
                limit_val_batches=steps,
                num_sanity_val_steps=0,
                log_every_n_steps=1,
            ),
            checkpoint=run.checkpoint.changed(enabled=False, resume_if_exists=False),
            exp_manager=run.exp_manager.changed(create_early_stopping_callback=False),
        ),
        loggers=(),
        run_dir=config.run_dir / "fast_dev_run",
    )
