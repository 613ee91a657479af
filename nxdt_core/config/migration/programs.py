"""Asks the components of the kind ``migration`` (:mod:`nxdt_core.protocols.migration`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nxdt_core.api import MigrationComponent
from nxdt_core.config.sources.files import read_source
from nxdt_core.config.sources.node import to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, MigrationUnknown, NotSupported, UnknownKey
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, Migration

__all__ = ["environment_notes", "explained", "migrate", "program_of", "recognising"]

_log = logging.getLogger(__name__)

_KIND = "migration"


def migrate(source: Path, target: Path, name: str | None, kernel: Kernel) -> MigratedConfig:
    """Rewrite a file of another program for this schema.

    Args:
        source: The file.
        target: Where the caller will write the text.
        name: Of the migration; None takes the one that recognises the file.
        kernel: Its plugins bring the migrations, and say what can be kept.

    Raises:
        ConfigError: the file cannot be read, or is not valid YAML.
        MigrationUnknown: no installed migration recognises it.
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of their plugins.
        UnknownComponent: no plugin offers a migration of that name.
        NxdtError: the migration refuses it.
    """
    if name is not None:
        return _loaded(kernel.registry.get(_KIND, name)).migrate(source, target, kernel)
    read = read_source(source, lambda: kernel)
    if read.problems:
        raise ConfigError(source=str(source), problems=read.problems)
    found = recognising(to_plain(read.tree), kernel)
    if not found:
        install, unusable = kernel.registry.not_offered(_KIND)
        installed = tuple(f"{each.record.name} ({program_of(each)})" for each in kernel.registry.all(_KIND))
        raise MigrationUnknown(source=str(source), installed=installed, install=install, unusable=unusable)
    return _loaded(kernel.registry.choose(_KIND, str(source), found)).migrate(source, target, kernel)


def recognising(config: Mapping[str, Any], kernel: Kernel) -> list[RegisteredComponent]:
    """Return the installed migrations that recognise a configuration, a nested plain tree."""
    return [component for component, migration in _usable(kernel) if migration.recognise(config)]


def explained(problems: Iterable[ConfigProblem], known: Collection[str], kernel: Kernel) -> Iterator[ConfigProblem]:
    """Yield the problems; those about a key that another program has say what it means here.

    Args:
        problems: In any order.
        known: Key paths of the schema, with those of the selected components.
        kernel: Its plugins bring the migrations.
    """
    migrations: list[Migration] | None = None
    for problem in problems:
        if isinstance(problem, UnknownKey) or (isinstance(problem, NotSupported) and problem.of_legacy):
            migrations = [each for _, each in _usable(kernel)] if migrations is None else migrations
            answers = (migration.explain(problem.key, known) for migration in migrations)
            _explain(problem, next((answer for answer in answers if answer is not None), KeyMeaning()))
        yield problem


def environment_notes(environment: Mapping[str, str], kernel: Kernel) -> Iterator[str]:
    """Yield a line for each program whose job scripts have set variables that nxdt does not read."""
    for _, migration in _usable(kernel):
        note = migration.environment_note(environment)
        if note is not None:
            yield note


def program_of(component: RegisteredComponent) -> str:
    """Return the name that messages have for the program of a migration."""
    record = component.record
    return (record.program if isinstance(record, MigrationComponent) else "") or record.name


def _explain(problem: UnknownKey | NotSupported, meaning: KeyMeaning) -> None:
    if isinstance(problem, NotSupported):
        problem.allowed = f"{meaning.name} in its place" if meaning.name else problem.allowed
    elif meaning.name:
        problem.candidates = (meaning.name,)
    elif meaning.unneeded:
        problem.candidates, problem.unneeded, problem.program = (), meaning.unneeded, meaning.program


def _loaded(component: RegisteredComponent) -> Migration:
    loaded: Migration = component.load_target()()
    return loaded


def _usable(kernel: Kernel) -> Iterator[tuple[RegisteredComponent, Migration]]:
    """The migrations that can be imported. One that cannot is skipped with a warning: a run does not need it."""
    for component in kernel.registry.all(_KIND):
        try:
            yield component, _loaded(component)
        except NxdtError as error:
            _log.warning("The migration %r of %s is skipped: %s", component.record.name, component.dist, error.what())
