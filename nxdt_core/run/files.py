"""The run's directory: where it is, and its copies of what the run was started with."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nxdt_core import checkpoint
from nxdt_core.config import ResolvedConfig, render_show
from nxdt_core.config.show import shown_words
from nxdt_core.config.sources import RECIPE_SCHEME
from nxdt_core.errors.checkpoints import StorageError, StoreInUse
from nxdt_core.errors.training import CannotCopyFile, CannotWriteRunDirectory
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.file_lock import FileLock, take_file_lock, this_process
from nxdt_core.system.paths import PackageNotFound, expand_home, resolve_path
from nxdt_core.system.regular_files import copy_file, make_directory, open_regular, regular_opener, replace_text
from nxdt_core.train.build import run_dir_explained

if TYPE_CHECKING:
    from nxdt_core.checkpoint import Ownership

_CONFIG = "config.yaml"
_COMMANDS = "cmd-args.log"
"""The command line of each start of the run, one per line."""


def with_dated_run_dir(config: ResolvedConfig, ranks: RankAgreement) -> ResolvedConfig:
    """Return the configuration; with ``use_datetime_version``, its run directory is named after the first rank's time.

    Collective. A run that resumes keeps its directory, and so does a run whose directory has a name. If the directory
    exists, because another run began in the same second or the clock was set back, the name gets a number.
    """
    manager = config.run.exp_manager
    named = manager.version is not None or manager.explicit_log_dir is not None
    if not manager.use_datetime_version or named or config.run.checkpoint.resume_if_exists:
        return config
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    version = ranks.broadcast_object(next(each for each in names if not os.path.lexists(config.run_dir / each)))
    run_dir = config.run_dir / version
    return replace(
        config,
        run=config.run.changed(exp_manager=manager.changed(version=version)),
        run_dir=run_dir,
        checkpoint_uri=config.run.checkpoint.uri or str(run_dir / "checkpoints"),
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
            source = _source(name)
            copy_file(source, make_directory(config.run_dir / "files") / source.name)


def _source(name: str) -> Path:
    try:
        source = resolve_path(name)
        os.close(open_regular(source, follow=True))  # a pipe would block
        return source
    except (OSError, PackageNotFound) as error:
        raise CannotCopyFile(path=name, reason=getattr(error, "strerror", None) or str(error)) from error


_LOCK = ".nxdt-lock-run"
"""Subdirectory of a run's directory with its lock. (The run's directory itself may be the store, which has another.)"""


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
    ownerships: list[Ownership] = []
    with ExitStack() as stack:

        def take() -> None:
            stack.callback(_own_directory(config, say).release)
            if storage is not None and config.run.checkpoint.enabled:
                ownerships.append(checkpoint.own(storage, run=config.run.name, say=say))
                stack.callback(ownerships[0].release)

        ranks.on_rank_zero(take)
        yield ownerships[0] if ownerships else None


def _own_directory(config: ResolvedConfig, say: Callable[[str], None]) -> Ownership | FileLock:
    with run_dir_explained(config):
        config.run_dir.mkdir(parents=True, exist_ok=True)
    folder = config.run_dir / _LOCK
    if folder.is_symlink():  # the root of a store may be one
        raise CannotWriteRunDirectory(path=str(config.run_dir), reason=f"{_LOCK} is a symbolic link")
    # The lock of an owned store, which is free as a rule; where it is not, or cannot be, the store waits, takes a lease
    # instead, or says why.
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        lock = take_file_lock(folder / ".nxdt-lock-owner", this_process(config.run.name).encode())
        if lock is not None:
            return lock
    try:
        return checkpoint.own(directory_lock(config.run_dir), run=config.run.name, say=say)
    except StoreInUse as error:
        raise StoreInUse(where=str(config.run_dir), owner=error.owner, reason=error.reason) from None
    except StorageError as error:
        reason = f"{os.path.relpath(error.where, config.run_dir)}: {error.reason}"
        raise CannotWriteRunDirectory(path=str(config.run_dir), reason=reason) from error
