"""Configurations of other programs: which migration takes one, and the report of what became of each key.

Asks the components of the kind ``migration`` (:mod:`nxdt_core.protocols.migration`). A file of another program is read
as the migration that recognises it writes it; nothing is written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from nxdt_core.api import MigrationComponent
from nxdt_core.config.sources import COMMAND_LINE, Source, read_source
from nxdt_core.config.tree import KeyPath, Origin, Tree, dotted, parse_yaml, parts_of, plain, walk
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, MigrationUnknown, UnknownKey
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.registry import showing_migrations
from nxdt_core.protocols.migration import MigratedConfig, Migration, Verdict

__all__ = [
    "converted",
    "environment_notes",
    "explained",
    "migrate",
    "program_of",
    "summary",
]

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
        migration: Migration = kernel.registry.get(_KIND, name).load_target()()
        return migration.migrate(source, target, kernel, {})
    read = read_source(source, lambda: kernel)
    if read.problems:
        raise ConfigError(source=str(source), problems=read.problems)
    found = _recognising(read, kernel)
    if found is None:
        raise _unknown(read.label, kernel)
    return found[1].migrate(source, target, kernel, {})


@dataclass(frozen=True, slots=True)
class Converted:
    """A source and overrides in keys of nxdt."""

    source: Source
    """Each value has its line of the file."""
    overrides: Sequence[Tree]
    """In their order; each value that the migration took has its key of the other program as ``own``."""
    unread: Mapping[KeyPath, str] = field(default_factory=dict)
    """Key of an override that the migration leaves out → a note that says why. nxdt may have a key of this name."""
    notes: Sequence[str] = ()
    """What became of which key."""


def converted(source: Source, overrides: Sequence[Tree], kernel: Kernel) -> Converted:
    """Return a source and overrides in keys of nxdt. A file that is not of another program is returned as it is.

    Args:
        source: A file that could be read.
        overrides: With keys of the file or of nxdt.
        kernel: Its plugins bring the migrations.

    Raises:
        MigrationUnknown: keys show that it is of a program whose migration is not installed.
        NxdtError: the migration refuses it.
    """
    found, path = _recognising(source, kernel), source.path
    assert path is not None
    if found is None:
        if any(kernel.registry.not_offered(_KIND)) and any(key in source.tree for key in showing_migrations()):
            raise _unknown(source.label, kernel)
        return Converted(source, overrides)
    component, migration = found
    given = {dotted(at): value for each in overrides for at, value in each.leaves()}
    done = migration.migrate(path, path, kernel, given)
    tree, _ = parse_yaml(done.text, source.label)
    before = {row.target: row.key for row in done.keys if row.target}
    _place(tree, (), source.tree, before, Origin(kind="plugin", where=component.dist))
    counts = ", ".join(f"{verdict} {count}" for verdict, count in summary(done))
    notes = [f"{source.label}: read as a file of {done.program}, as nxdt config migrate writes it: {counts}"]
    for row in done.keys:
        # why an override is left out is said once it is known that nxdt does not have its key, either
        if row.verdict == "changed" or (row.verdict in ("added", "ignored", "unsupported") and row.key not in given):
            place = f"{source.label}:{row.line}" if row.line else source.label
            place = str(COMMAND_LINE) if row.key in given else place
            value = f" ({row.value})" if row.value else ""
            notes.append(f"{place}: {row.key}{value}: {row.verdict}; {row.reason}")
    rows = {row.key: row for row in done.keys if row.verdict != "added"}
    words, unread = list[Tree](), dict[KeyPath, str]()
    for each in overrides:
        words.append(Tree({}, {(): COMMAND_LINE}))
        for at, value in each.leaves():
            origin, key = each.origins[at], dotted(at)
            parts = (dotted(at[:depth]) for depth in range(len(at), 0, -1))
            answer = next((rows[part] for part in parts if part in rows), None)
            target = (answer.target or key) if answer is not None and answer.key == key else key
            if answer is None:
                words[-1].set(at, value, origin)
            elif answer.verdict in ("mapped", "renamed", "changed") and target in tree:
                words[-1].set(target, tree.get(target), replace(origin, own=key if target != key else ""))
            else:
                unread[at] = f"{COMMAND_LINE}: {key}: {answer.verdict}; {answer.reason}"
                words[-1].set(at, value, origin)
    return Converted(replace(source, tree=tree), words, unread, notes)


def _place(tree: Tree, path: KeyPath, file: Tree, before: Mapping[str, str], added: Origin) -> Origin:
    """Give the values of a migrated tree the origins of their keys in ``file``, which had other names ``before``.

    Returns:
        The origin at ``path``. A section that the file does not have is where the first of its keys is.
    """
    value, name = tree.get(path), dotted(path)
    below = [_place(tree, (*path, key), file, before, added) for key in value] if isinstance(value, dict) else []
    there = before.get(name, name)
    first = next((origin for origin in below if origin.kind == "file"), added)
    origin = file.origin(there) if there in file else first
    if not below:
        tree.origins |= {each: origin for each, _ in walk(value, path)}
    tree.origins[path] = origin
    return origin


def summary(migration: MigratedConfig) -> list[tuple[Verdict, str]]:
    """Return verdict and number of keys, those that lose something last."""
    counts = Counter(row.verdict for row in migration.keys)
    return [(verdict, str(counts[verdict])) for verdict in get_args(Verdict) if counts[verdict]]


def _recognising(source: Source, kernel: Kernel) -> tuple[RegisteredComponent, Migration] | None:
    """Return the installed migration that recognises a source, of several the preferred one; None where none does."""
    config = plain(source.tree.data)
    found = {component: migration for component, migration in _usable(kernel) if migration.recognise(config)}
    if not found:
        return None
    component = kernel.registry.choose(_KIND, source.label, list(found))
    return component, found[component]


def _unknown(label: str, kernel: Kernel) -> NxdtError:
    install, unusable = kernel.registry.not_offered(_KIND)
    installed = tuple(f"{each.record.name} ({program_of(each)})" for each in kernel.registry.all(_KIND))
    return MigrationUnknown(source=label, installed=installed, install=install, unusable=unusable)


def explained(
    problems: Iterable[ConfigProblem], tree: Tree, known: Collection[str], kernel: Kernel
) -> Iterator[ConfigProblem]:
    """Yield the problems; those about a key that another program has say what it means here.

    Args:
        problems: In any order.
        tree: The values. A section that another program has is reported key by key.
        known: Key paths of the schema, with those of the selected components.
        kernel: Its plugins bring the migrations.
    """
    migrations: list[Migration] | None = None
    for problem in problems:
        if not isinstance(problem, UnknownKey):
            yield problem
            continue
        migrations = [each for _, each in _usable(kernel)] if migrations is None else migrations
        leaves, answered = list[UnknownKey](), False
        if isinstance(tree.get(problem.key), dict):
            paths = [(*parts_of(problem.key), *at) for at, _ in tree.copy(problem.key).leaves()]
            leaves = [UnknownKey(**tree.origin(at).at(dotted(at)), known=problem.known) for at in paths]
        for each in (problem, *leaves):
            answers = (migration.explain(each.key, known) for migration in migrations)
            meaning = next((answer for answer in answers if answer is not None), None)
            if meaning is not None:
                answered = answered or each is not problem
                each.candidates = (meaning.name,) if meaning.name else ()
                each.unneeded, each.program = meaning.unneeded, meaning.program
        yield from leaves if answered else [problem]


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


def _usable(kernel: Kernel) -> Iterator[tuple[RegisteredComponent, Migration]]:
    """The migrations that can be imported. One that cannot is skipped with a warning: a run does not need it."""
    for component in kernel.registry.all(_KIND):
        try:
            yield component, component.load_target()()
        except NxdtError as error:
            _log.warning("The migration %r of %s is skipped: %s", component.record.name, component.dist, error.what())
