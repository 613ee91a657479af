"""The start of a run: its directory, the lock on it and the copies in it; the checkpoint that the run begins with, and
the configuration with what is known only then."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_first_rank
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.config import ResolvedConfig, render_show
from nxdt_core.config.hub import complete
from nxdt_core.config.show import shown_words
from nxdt_core.config.sources import RECIPE_SCHEME
from nxdt_core.errors.checkpoints import BaseDtypeChanged, ForeignHasWeightsOnly, StorageError, StoreInUse
from nxdt_core.errors.training import (
    CannotCopyFile,
    CannotWriteRunDirectory,
    LengthUnknown,
    NoCheckpointToResume,
    PluginVersionChanged,
    RunAlreadyHasCheckpoints,
)
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.file_lock import FileLock, take_file_lock, this_process
from nxdt_core.system.paths import PackageNotFound, expand_home, resolve_path
from nxdt_core.system.regular_files import copy_file, make_directory, open_regular, regular_opener, replace_text
from nxdt_core.train import build
from nxdt_core.train.build import run_dir_explained
from nxdt_core.train.weights.saved_config import base_step, saved_adapter

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Manifest, Ownership

_CONFIG = "config.yaml"
_COMMANDS = "cmd-args.log"
"""The command line of each start of the run, one per line."""
_LOCK = ".nxdt-lock-run"
"""Subdirectory of a run's directory with its lock. (The run's directory itself may be the store, which has another.)"""


def with_dated_run_dir(config: ResolvedConfig, ranks: RankAgreement) -> ResolvedConfig:
    """Return the configuration with a run directory that is named after the first rank's time. Collective.

    A run that resumes keeps its directory, and so does a run whose directory has a name. If the directory exists,
    because another run began in the same second or the clock was set back, the name gets a number.
    """
    manager = config.run.exp_manager
    named = manager.version is not None or manager.explicit_log_dir is not None
    if named or config.run.checkpoint.resume_if_exists:
        return config
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    version = ranks.broadcast_object(next(name for name in names if not os.path.lexists(config.run_dir / name)))
    run_dir = config.run_dir / version
    return replace(
        config,
        run=config.run.changed(exp_manager=manager.changed(version=version)),
        run_dir=run_dir,
        checkpoint_uri=config.run.checkpoint.uri or str(run_dir / "checkpoints"),
    )


def fast_dev_run(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of the trial of a few steps. Learning rates are those of the run."""
    run, steps = config.run, int(config.run.trainer.fast_dev_run)
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


def previous_source(config: ResolvedConfig) -> str | None:
    """Return the file or recipe that the run was last started from, where this start is from another; else None.

    The configuration in the run's own directory and a mapping in memory count as the same source.
    """
    try:
        with open(config.run_dir / _CONFIG, encoding="utf-8", opener=regular_opener) as file:
            last = file.readline().strip().removeprefix("# ").removesuffix(", resolved")
    except (OSError, UnicodeDecodeError):
        return None
    before, now = _source_place(last, config.run_dir), _source_place(config.source, config.run_dir)
    return last if before is not None and now is not None and before != now else None


def _source_place(label: str, run_dir: Path) -> str | None:
    """Return what identifies a recipe or a file; None for anything else, and for files in the run's directory."""
    if label.startswith(RECIPE_SCHEME):
        return f"{RECIPE_SCHEME}{label.rpartition(':')[2]}"
    path = expand_home(label).absolute()
    return str(path) if path.suffix in (".yaml", ".yml") and path.parent != run_dir.absolute() else None


def keep_inputs(config: ResolvedConfig) -> None:
    """Write the configuration, the command line and the files to copy next to what they produce.

    Raises:
        CannotWriteRunDirectory: the directory cannot be written.
        CannotCopyFile: a file is missing, or two have the same name.
    """
    with run_dir_explained(config):
        replace_text(config.run_dir / _CONFIG, render_show(config))
        with open(config.run_dir / _COMMANDS, "a", encoding="utf-8", opener=regular_opener) as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {shlex.join(shown_words(config, sys.argv))}\n")
        names = config.run.exp_manager.files_to_copy or ()
        stems = [Path(name).name for name in names]
        for name in names:
            if stems.count(Path(name).name) > 1:
                raise CannotCopyFile(path=name, reason="another file to copy has the same name")
            try:
                source = resolve_path(name)
                os.close(open_regular(source, follow=True))  # a pipe would block
            except (OSError, PackageNotFound) as error:
                raise CannotCopyFile(path=name, reason=getattr(error, "strerror", None) or str(error)) from error
            copy_file(source, make_directory(config.run_dir / "files") / source.name)


def directory_lock(run_dir: Path) -> CheckpointStore:
    """Return the store whose owner is the run that may write to ``run_dir``."""
    return checkpoint.open_storage(str(run_dir / _LOCK))


@contextmanager
def owned_on_rank_zero(
    config: ResolvedConfig, storage: CheckpointStore | None, say: Callable[[str], None], ranks: RankAgreement
) -> Iterator[Ownership | None]:
    """Own the run's directory for a block, and ``storage`` where the run saves, on the first rank; collective.
    Yields the ownership of ``storage``, None where there is none.

    Raises:
        StoreInUse: on every rank: another run writes to one of them.
        CannotWriteRunDirectory: on every rank.
    """
    ownership: Ownership | None = None
    with ExitStack() as stack:

        def take() -> None:
            nonlocal ownership
            with run_dir_explained(config):
                config.run_dir.mkdir(parents=True, exist_ok=True)
            folder = config.run_dir / _LOCK
            if folder.is_symlink():  # the root of a store may be one
                raise CannotWriteRunDirectory(path=str(config.run_dir), reason=f"{_LOCK} is a symbolic link")
            # The lock of an owned store, which is free as a rule; where it is not, or cannot be, the store waits, takes
            # a lease instead, or says why.
            lock: FileLock | Ownership | None = None
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                lock = take_file_lock(folder / ".nxdt-lock-owner", this_process(config.run.name).encode())
            try:
                lock = lock or checkpoint.own(directory_lock(config.run_dir), run=config.run.name, say=say)
            except StoreInUse as error:
                raise StoreInUse(where=str(config.run_dir), owner=error.owner, reason=error.reason) from None
            except StorageError as error:
                reason = f"{os.path.relpath(error.where, config.run_dir)}: {error.reason}"
                raise CannotWriteRunDirectory(path=str(config.run_dir), reason=reason) from error
            stack.callback(lock.release)
            if storage is not None and config.run.checkpoint.enabled:
                ownership = checkpoint.own(storage, run=config.run.name, say=say)
                stack.callback(ownership.release)

        ranks.on_rank_zero(take)
        yield ownership


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


def decide_start(
    config: ResolvedConfig, store: CheckpointStore, say: Callable[[str], None], ranks: RankAgreement | None = None
) -> Start | ForeignStart | None:
    """Decide what to load; None starts at step 0.

    Collective, with one answer: no rank may start from what another rank finds damaged or missing.

    Args:
        config: its section ``checkpoint`` says what is wanted.
        store: the run's store.
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
        newest = checkpoint.latest(store, warn=say, ranks=ranks, trusted=build.trusted_keys(config))
        if newest is not None:
            return Start(storage=store, manifest=newest, weights_only=False)
    elif wanted.enabled:
        committed = (status.step for status in newest_first(store) if status.state == "committed")
        newest_step = on_first_rank(ranks, lambda: next(committed, None), where=store.uri)
        if newest_step is not None:
            raise RunAlreadyHasCheckpoints(uri=store.uri, step=newest_step)
    if wanted.resume_from is not None:
        return _named(config, wanted.resume_from, say, ranks)
    if wanted.resume_if_exists and not wanted.resume_ignore_no_checkpoint:
        raise NoCheckpointToResume(uri=store.uri)
    return None


def check_adapter(config: ResolvedConfig, start: Start) -> None:
    """Check that the weights of ``start`` compute the same under this run's adapter as under that of the run that saved
    them.

    Raises:
        NxdtError: they do not.
    """
    where = build.step_uri(start.storage, start.manifest.step)
    saved, now = saved_adapter(start.manifest, config), config.run.adapter.base_dtype
    before = saved.get("base_dtype")
    if not start.weights_only and saved.get("name") is not None and before != now:
        raise BaseDtypeChanged(where=where, saved=before or "null", found=now or "null")
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
    tree.set(key, uri, tree.origin(key), f"{shown.rstrip('/')}/{step_name(began.manifest.step)}" if shown else None)
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
