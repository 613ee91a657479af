"""Configurations of other programs: which migration takes one, and the report of what became of each key.

Asks the components of the kind ``migration`` (:mod:`nxdt_core.protocols.migration`). A file of another program is read
as the migration that recognises it writes it; nothing is written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from nxdt_core.api import MigrationComponent
from nxdt_core.config.sources import Source, read_source
from nxdt_core.config.tree import Node, Origin, join, mapped, parse_yaml, to_plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, MigrationUnknown, UnknownKey
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.registry import showing_migrations
from nxdt_core.protocols.migration import KeyMeaning, MigratedConfig, MigratedKey, Migration, Verdict

__all__ = [
    "converted",
    "environment_notes",
    "explained",
    "migrate",
    "program_of",
    "report_json",
    "report_markdown",
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
        return _loaded(kernel.registry.get(_KIND, name)).migrate(source, target, kernel)
    read = read_source(source, lambda: kernel)
    if read.problems:
        raise ConfigError(source=str(source), problems=read.problems)
    found = _recognising(read, kernel)
    if found is None:
        raise _unknown(read.label, kernel)
    return _loaded(found).migrate(source, target, kernel)


def converted(source: Source, kernel: Kernel) -> tuple[Source, list[str]]:
    """Return a source in keys of nxdt, each with its line of the file, and notes on what became of which key.

    A file that is not of another program is returned as it is.

    Args:
        source: A file that could be read.
        kernel: Its plugins bring the migrations.

    Raises:
        MigrationUnknown: keys show that it is of a program whose migration is not installed.
        NxdtError: the migration refuses it.
    """
    found, path = _recognising(source, kernel), source.path
    assert path is not None
    if found is None:
        if any(kernel.registry.not_offered(_KIND)) and any(source.tree.find(key) for key in showing_migrations()):
            raise _unknown(source.label, kernel)
        return source, []
    done = _loaded(found).migrate(path, path, kernel)
    tree, _ = parse_yaml(done.text, source.label, source.tree.origin.directory)
    before = {row.target: row.key for row in done.keys if row.target}
    tree = _placed(tree, "", source.tree, before, Origin(kind="plugin", where=found.dist))
    return replace(source, tree=tree), list(_notes(done, source))


def _placed(node: Node, path: str, file: Node, before: Mapping[str, str], added: Origin) -> Node:
    """Return a migrated tree whose nodes are where ``file`` has their keys, which had other names ``before``."""
    children = {key: _placed(child, join(path, key), file, before, added) for key, child in node.children.items()}
    there = file.find(before.get(path, path)) if path else file
    below = (child.origin for child in children.values() if child.origin.kind == "file")
    origin = there.origin if there is not None else next(below, added)
    if children:
        return Node(children, origin)
    return mapped(node, lambda each: replace(each, origin=origin))


def _notes(done: MigratedConfig, source: Source) -> Iterator[str]:
    """Yield what ``nxdt config migrate`` prints, and a line for each value that is another one than in the file."""
    counts = ", ".join(f"{verdict} {count}" for verdict, count in summary(done))
    yield f"{source.label}: read as a file of {done.program}, as nxdt config migrate writes it: {counts}"
    for row in done.keys:
        if row.verdict in ("changed", "added", "ignored", "unsupported"):
            place = f"{source.label}:{row.line}" if row.line else source.label
            value = f" ({row.value})" if row.value else ""
            yield f"{place}: {row.key}{value}: {row.verdict}; {row.reason}"


def summary(migration: MigratedConfig) -> list[tuple[Verdict, str]]:
    """Return verdict and number of keys, those that lose something last."""
    counts = Counter(row.verdict for row in migration.keys)
    return [(verdict, str(counts[verdict])) for verdict in get_args(Verdict) if counts[verdict]]


def _recognising(source: Source, kernel: Kernel) -> RegisteredComponent | None:
    """The installed migration that recognises a source; of several the preferred one."""
    config = to_plain(source.tree)
    found = [component for component, migration in _usable(kernel) if migration.recognise(config)]
    return kernel.registry.choose(_KIND, source.label, found) if found else None


def _unknown(label: str, kernel: Kernel) -> NxdtError:
    install, unusable = kernel.registry.not_offered(_KIND)
    installed = tuple(f"{each.record.name} ({program_of(each)})" for each in kernel.registry.all(_KIND))
    return MigrationUnknown(source=label, installed=installed, install=install, unusable=unusable)


def explained(problems: Iterable[ConfigProblem], known: Collection[str], kernel: Kernel) -> Iterator[ConfigProblem]:
    """Yield the problems; those about a key that another program has say what it means here.

    Args:
        problems: In any order.
        known: Key paths of the schema, with those of the selected components.
        kernel: Its plugins bring the migrations.
    """
    migrations: list[Migration] | None = None
    for problem in problems:
        if isinstance(problem, UnknownKey):
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


def _explain(problem: UnknownKey, meaning: KeyMeaning) -> None:
    if meaning.name:
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


_MEANINGS: dict[Verdict, str] = {
    "mapped": "kept under its name",
    "renamed": "kept under another name",
    "changed": "kept with another value",
    "added": "not in the file; written since leaving it out would mean something else here",
    "unneeded": "left out; nothing is lost without it",
    "off": "left out; it is unset, switched off, or says what holds here anyway",
    "ignored": "left out; the framework that the file is of did not read it",
    "unsupported": "left out; it asks for something that is not done here",
}


def report_markdown(migration: MigratedConfig) -> str:
    """Return the report as a page."""
    lines = [f"# {migration.source} → {migration.target}", "", f"A file of {migration.program}.", ""]
    lines += ["| verdict | keys | meaning |", "|---|---|---|"]
    lines += [f"| {verdict} | {count} | {_MEANINGS[verdict]} |" for verdict, count in summary(migration)]
    lines += ["", "## Still to be set", "", *_list(migration.to_set)]
    lines += ["", "## What `nxdt config check` says of it now", "", *_list(migration.remaining)]
    lines += ["", "## Every key", "", "| line | key | value | verdict | now | why |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in migration.keys]
    return "\n".join(lines) + "\n"


def report_json(migration: MigratedConfig) -> dict[str, Any]:
    """Return the report of a migration as values of JSON."""
    return {
        "source": str(migration.source),
        "target": str(migration.target),
        "framework": migration.program,
        "keys": [
            {
                "key": row.key,
                "line": row.line or None,
                "verdict": row.verdict,
                "target": row.target or None,
                "value": row.value,
                "reason": row.reason or None,
            }
            for row in migration.keys
        ],
        "to_set": [{"key": key, "reason": reason} for key, reason in migration.to_set],
        "remaining": [{"key": key, "problem": problem} for key, problem in migration.remaining],
    }


def _list(entries: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"- `{key}`: {text}" for key, text in entries] or ["Nothing."]


def _row(row: MigratedKey) -> str:
    cells = (
        str(row.line or ""),
        f"`{row.key}`",
        f"`{row.value}`" if row.value else "",
        row.verdict,
        f"`{row.target}`" if row.target else "",
        row.reason,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
