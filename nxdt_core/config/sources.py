"""Sources of values: files, recipes of plugins, files of other programs, what a file is based on, and the command line.

A file of another program is read as the migration that recognises it writes it (:mod:`nxdt_core.protocols.migration`);
nothing is written.
"""

from __future__ import annotations

import difflib
import glob
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from nxdt_core.api import MigrationComponent
from nxdt_core.config.tree import (
    KeyPath,
    Origin,
    Tree,
    describe_value,
    dotted,
    parse_yaml,
    parts_of,
    plain,
    walk,
)
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import (
    BadOverride,
    ConfigError,
    ConfigFileNotFound,
    ConfigProblem,
    ConfigUnreadable,
    MigrationUnknown,
    Place,
    UnknownKey,
    UnknownRecipe,
    WrongValue,
    YamlSyntax,
    YamlTooLarge,
)
from nxdt_core.kernel import Kernel, PluginInfo, RegisteredComponent
from nxdt_core.kernel.plugin import advise, diagnose
from nxdt_core.kernel.registry import missing_dist, showing_migrations
from nxdt_core.system.paths import PackageNotFound, expand_home, package_directory, resolve_path

if TYPE_CHECKING:
    from nxdt_core.protocols.migration import MigratedConfig, Migration, Verdict

_log = logging.getLogger(__name__)

RECIPE_SCHEME = "recipe:"
EDITOR_LINES = """\
# yaml-language-server: $schema=nxdt.schema.json
# Completes keys in editors; `nxdt config schema > nxdt.schema.json` writes it.
"""
"""Beginning of a printed recipe. The path is relative to the file that it is in."""


COMMAND_LINE = Origin(kind="override", where="command line")
_PATH = re.compile(r"[^\s.=\[\]{}]+(\.[^\s.=\[\]{}]+)*")
BASE = "base"
"""The key that names what a source is based on."""
_KIND = "migration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe that a plugin brings, by name and file."""

    name: str
    """Stem of the file."""
    plugin: str
    path: Path

    @property
    def summary(self) -> str:
        """Return the first comment line of the file but those for editors; empty where it does not start with one."""
        first = self.text.removeprefix(EDITOR_LINES).lstrip().partition("\n")[0]
        return first.lstrip("#").strip() if first.startswith("#") else ""

    @property
    def rank(self) -> int:
        """Return the recipe's place among those to start with, from a line ``# Start here: 1``; 0 without one."""
        match = re.search(r"^# Start here: (\d+)$", self.text, re.MULTILINE)
        return int(match[1]) if match else 0

    @property
    def text(self) -> str:
        """Return the recipe's YAML."""
        return self.path.read_text(encoding="utf-8")


def list_recipes(kernel: Kernel) -> tuple[Recipe, ...]:
    """Return the recipes of all usable plugins, sorted by name, numbers in it by size, and plugin."""

    def order(recipe: Recipe) -> tuple[list[tuple[int, str]], str]:
        """``llama3-8b`` before ``llama3-70b``: a number counts its digits before it is compared."""
        parts = re.findall(r"\d+|\D", recipe.name)
        return [(len(part) if part.isdigit() else 0, part) for part in parts], recipe.plugin

    return tuple(sorted(_recipes(kernel.plugins), key=order))


def find_recipe(kernel: Kernel, name: str, named: Place | None = None) -> Recipe:
    """Return the recipe called ``name``, or ``plugin:name`` where several plugins have one of that name.

    Args:
        kernel: Its plugins bring the recipes.
        name: Without ``recipe:``.
        named: Where it is named; None: by the user.

    Raises:
        UnknownRecipe: there is none, there is more than one, or its plugin cannot be used.
    """
    plugin, _, short = name.rpartition(":")
    meant = [recipe for recipe in _recipes(kernel.plugins, short) if plugin in ("", recipe.plugin)]
    meant.sort(key=lambda recipe: recipe.plugin)
    if len(meant) == 1:
        return meant[0]
    others = (other for other in kernel.plugins if other.state not in ("ok", "shadowed") and plugin in ("", other.name))
    reason, advice, candidates = "no plugin has a recipe of that name", "", tuple[str, ...]()
    if len({recipe.plugin for recipe in meant}) == 1:
        files = " and ".join(f"'{recipe.path}'" for recipe in meant)
        reason, advice = f"{files} are recipes of the same name", "rename all but one of these files"
    elif meant:
        reason = "several plugins have a recipe of that name"
        candidates = tuple(f"{RECIPE_SCHEME}{recipe.plugin}:{recipe.name}" for recipe in meant)
    elif unusable := next((other for other in others if any(_recipes([other], short, usable=False))), None):
        reason = f"the recipe {short!r} belongs to a plugin that is not used: {diagnose(unusable)}"
        advice = advise(unusable)
    elif dist := missing_dist("recipe", short, kernel.plugins):
        reason, advice = "no installed plugin has a recipe of that name", f"install it: pip install {dist}"
    else:
        close = difflib.get_close_matches(short, [recipe.name for recipe in _recipes(kernel.plugins)], n=3)
        candidates = tuple(f"{RECIPE_SCHEME}{match}" for match in dict.fromkeys(close))
    place = named or Place(place=f"{RECIPE_SCHEME}{name}", line=0, key="")
    raise UnknownRecipe(**place, reason=reason, advice=advice, candidates=candidates)


def _recipes(plugins: Iterable[PluginInfo], name: str | None = None, *, usable: bool = True) -> Iterator[Recipe]:
    """Yield the recipes of plugins, those of one name or all."""
    pattern = "*" if name is None else glob.escape(name)
    for plugin in plugins if "/" not in pattern else ():
        package = plugin.module.partition(":")[0].partition(".")[0] if plugin.state == "ok" or not usable else ""
        if (directory := package_directory(package)) is not None:
            for path in sorted((directory / "recipes").rglob(f"{pattern}.yaml")):
                yield Recipe(name=path.stem, plugin=plugin.name, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of a configuration: a file, a recipe or a mapping, parsed."""

    label: str
    """Name that the user gave."""
    tree: Tree
    problems: tuple[ConfigProblem, ...]
    path: Path | None = None
    """Path of a file that was named."""
    stem: str = ""
    """Name of the file or recipe without its ending; empty for a mapping."""
    readable: bool = True
    """False where there is nothing to check, since the text could not be read or parsed."""


def read_source(
    source: str | Path | Mapping[str, Any],
    find_kernel: Callable[[], Kernel],
    named: Place | None = None,
    label: str = "mapping",
) -> Source:
    """Read and parse; problems are returned, not raised.

    Args:
        source: A path, ``recipe:NAME``, or a mapping.
        find_kernel: Called where a recipe is named; its plugins bring the recipes.
        named: Where the source is named; None: by the user.
        label: What a mapping is called.
    """
    label = label if isinstance(source, Mapping) else str(source)
    nothing = Tree({}, {(): Origin(kind="file", where=label)})
    tree, problems, readable = nothing, list[ConfigProblem](), False
    path, stem = None, ""
    if isinstance(source, Mapping):
        tree, readable = Tree.of(source, nothing.origins[()]), True
    else:
        named = named or Place(place=label, line=0, key="")
        try:
            if label.startswith(RECIPE_SCHEME):
                recipe = find_recipe(find_kernel(), label.removeprefix(RECIPE_SCHEME), named)
                text, stem, directory = recipe.text, recipe.name, recipe.path.parent.absolute()
            else:
                path = expand_home(source)
                text, stem, directory = path.read_text(encoding="utf-8-sig"), path.stem, path.absolute().parent
        except UnknownRecipe as unknown:
            problems = [unknown]
        except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
            problems = [file_problem(expand_home(source), error, named, find_kernel)]
        else:
            tree, problems = parse_yaml(text, label, directory)
            readable = not (problems and isinstance(problems[0], (YamlSyntax, YamlTooLarge)))
    if not isinstance(tree.data, dict):
        place, allowed = tree.origins[()].at(""), "a mapping of keys and values"
        problems = [WrongValue(**place, found="no mapping at the top", allowed=allowed)]
        tree, readable = nothing, False
    return Source(label=label, tree=tree, problems=tuple(problems), path=path, stem=stem, readable=readable)


def file_problem(
    path: Path, error: Exception, place: Place, find_kernel: Callable[[], Kernel] | None = None
) -> ConfigProblem:
    """Return the problem behind an exception of reading a file, with names that are near a missing one.

    With ``find_kernel`` these may be recipes of its plugins.
    """
    if isinstance(error, FileNotFoundError):
        recipes = list_recipes(find_kernel()) if find_kernel else ()
        meant = tuple(f"{RECIPE_SCHEME}{recipe.name}" for recipe in recipes if recipe.name == path.name)
        neighbours: list[str] = []
        with suppress(OSError):
            neighbours = sorted(entry.name for entry in path.parent.iterdir())
        near = tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, neighbours, n=3))
        return ConfigFileNotFound(**place, path=str(path), candidates=meant or near)
    if isinstance(error, UnicodeDecodeError):
        reason = f"byte {error.start} is no UTF-8"
    else:
        text = getattr(error, "strerror", None) or str(error)
        reason = text[:1].lower() + text[1:]
    return ConfigUnreadable(**place, path=str(path), reason=reason)


def read_overrides(overrides: Sequence[str]) -> tuple[list[Tree], list[ConfigProblem]]:
    """Return the tree that each ``key.path=value`` sets, and what is wrong with others; values are read as YAML."""
    trees, problems = list[Tree](), list[ConfigProblem]()
    for word in overrides:
        path, equals, value = word.partition("=")
        if not equals or not _PATH.fullmatch(path):
            reason = f"{path!r} is not a key path" if equals else "it has no '='"
            problems.append(BadOverride(place=COMMAND_LINE.where, key="", text=word, reason=reason))
            continue
        document, faults = parse_yaml(f"value: {value}", COMMAND_LINE.where)
        if faults or "value" not in document:
            reason = "the value is empty"
            if faults and isinstance(faults[0], YamlSyntax):
                reason = f"the value is not valid YAML: {faults[0].reason}"
            elif faults:
                reason = f"the value cannot be used: {faults[0].what().rstrip('.')}"
            text = f"{path}=…"  # the value may hold a secret
            problems.append(BadOverride(place=COMMAND_LINE.where, key="", text=text, reason=reason))
            continue
        tree, parts = Tree({}, {(): COMMAND_LINE}), tuple(path.split("."))
        tree.set(parts, document.get("value"), COMMAND_LINE)
        for below, origin in document.origins.items():
            if origin.text:
                tree.origins[*parts, *below[1:]] = replace(COMMAND_LINE, text=origin.text)
        trees.append(tree)
    return trees, problems


def find_base(tree: Tree, seen: Sequence[str]) -> str:
    """Return the source that ``base`` names.

    Raises:
        WrongValue: it names none, or one of ``seen``, which need it.
    """
    text, origin, allowed = tree.get(BASE), tree.origin(BASE), f"the path of a YAML file, or {RECIPE_SCHEME}NAME"
    if not isinstance(text, str):
        raise WrongValue(**origin.at(BASE), found=describe_value(text), allowed=allowed)
    try:
        named = text if text.startswith(RECIPE_SCHEME) else str(resolve_path(text, origin.directory))
    except PackageNotFound as error:
        raise WrongValue(**origin.at(BASE), found=f"{text!r}, but {error}", allowed=allowed) from error
    if named in seen:
        found = f"{text!r}, which is itself based on this file"
        raise WrongValue(**origin.at(BASE), found=found, allowed="a file that is not")
    return named


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
    recognising = _recognising(read, kernel)
    if recognising is None:
        raise _unknown(read.label, kernel)
    return recognising[1].migrate(source, target, kernel, {})


def converted(
    source: Source, overrides: Sequence[Tree], kernel: Kernel
) -> tuple[Source, Sequence[Tree], Mapping[KeyPath, str], Sequence[str]]:
    """Return a source and overrides in keys of nxdt, what is left out, and notes on what became of which key.

    A file that is not of another program is returned as it is. Of one that is, each value has its line; each override
    that the migration takes has its key of the other program as ``own``. What is left out is key paths of overrides
    with a note that says why; nxdt may have keys of these names.

    Args:
        source: A file that could be read.
        overrides: With keys of the file or of nxdt.
        kernel: Its plugins bring the migrations.

    Raises:
        MigrationUnknown: keys show that it is of a program whose migration is not installed.
        NxdtError: the migration refuses it.
    """
    recognising, path = _recognising(source, kernel), source.path
    assert path is not None
    if recognising is None:
        if any(kernel.registry.not_offered(_KIND)) and any(key in source.tree for key in showing_migrations()):
            raise _unknown(source.label, kernel)
        return source, overrides, {}, ()
    component, migration = recognising
    overriding = {dotted(at): value for override in overrides for at, value in override.leaves()}
    done = migration.migrate(path, path, kernel, overriding)
    tree, _ = parse_yaml(done.text, source.label)
    before = {row.target: row.key for row in done.keys if row.target}
    _place(tree, (), source.tree, before, Origin(kind="plugin", where=component.dist))
    counts = ", ".join(f"{verdict} {count}" for verdict, count in summary(done))
    notes = [f"{source.label}: read as a file of {done.program}, as nxdt config migrate writes it: {counts}"]
    for row in done.keys:
        # why an override is left out is said once it is known that nxdt does not have its key, either
        if row.verdict == "changed" or (
            row.verdict in ("added", "ignored", "unsupported") and row.key not in overriding
        ):
            place = f"{source.label}:{row.line}" if row.line else source.label
            place = str(COMMAND_LINE) if row.key in overriding else place
            value = f" ({row.value})" if row.value else ""
            notes.append(f"{place}: {row.key}{value}: {row.verdict}; {row.reason}")
    rows = {row.key: row for row in done.keys if row.verdict != "added"}
    words, unread = list[Tree](), dict[KeyPath, str]()
    for override in overrides:
        words.append(Tree({}, {(): COMMAND_LINE}))
        for at, value in override.leaves():
            origin, key = override.origins[at], dotted(at)
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
    return replace(source, tree=tree), words, unread, notes


def _place(tree: Tree, path: KeyPath, file: Tree, before: Mapping[str, str], added: Origin) -> Origin:
    """Give the values of a migrated tree the origins of their keys in ``file``, which had other names ``before``.

    Returns:
        The origin at ``path``. A section that the file does not have is where the first of its keys is.
    """
    value, name = tree.get(path), dotted(path)
    below = [_place(tree, (*path, key), file, before, added) for key in value] if isinstance(value, dict) else []
    old_name = before.get(name, name)
    first = next((origin for origin in below if origin.kind == "file"), added)
    origin = file.origin(old_name) if old_name in file else first
    if not below:
        tree.origins |= {at: origin for at, _ in walk(value, path)}
    tree.origins[path] = origin
    return origin


def summary(migration: MigratedConfig) -> list[tuple[Verdict, str]]:
    """Return verdict and number of keys, those that lose something last."""
    from nxdt_core.protocols.migration import Verdict

    counts = Counter(row.verdict for row in migration.keys)
    return [(verdict, str(counts[verdict])) for verdict in get_args(Verdict) if counts[verdict]]


def _recognising(source: Source, kernel: Kernel) -> tuple[RegisteredComponent, Migration] | None:
    """Return the installed migration that recognises a source, of several the preferred one; None where none does."""
    config = plain(source.tree.data)
    recognising = {component: migration for component, migration in _usable(kernel) if migration.recognise(config)}
    if not recognising:
        return None
    component = kernel.registry.choose(_KIND, source.label, list(recognising))
    return component, recognising[component]


def _unknown(label: str, kernel: Kernel) -> NxdtError:
    install, unusable = kernel.registry.not_offered(_KIND)
    records = [component.record for component in kernel.registry.all(_KIND)]
    migrations = [record for record in records if isinstance(record, MigrationComponent)]
    installed = tuple(f"{record.name} ({record.program or record.name})" for record in migrations)
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
        migrations = [migration for _, migration in _usable(kernel)] if migrations is None else migrations
        leaves, answered = list[UnknownKey](), False
        if isinstance(tree.get(problem.key), dict):
            paths = [(*parts_of(problem.key), *at) for at, _ in tree.copy(problem.key).leaves()]
            leaves = [UnknownKey(**tree.origin(at).at(dotted(at)), known=problem.known) for at in paths]
        for fault in (problem, *leaves):
            answers = (migration.explain(fault.key, known) for migration in migrations)
            meaning = next((answer for answer in answers if answer is not None), None)
            if meaning is not None:
                answered = answered or fault is not problem
                fault.candidates = (meaning.name,) if meaning.name else ()
                fault.unneeded, fault.program = meaning.unneeded, meaning.program
        yield from leaves if answered else [problem]


def environment_notes(environment: Mapping[str, str], kernel: Kernel) -> Iterator[str]:
    """Yield a line for each program whose job scripts have set variables that nxdt does not read."""
    for _, migration in _usable(kernel):
        note = migration.environment_note(environment)
        if note is not None:
            yield note


def _usable(kernel: Kernel) -> Iterator[tuple[RegisteredComponent, Migration]]:
    """The migrations that can be imported. One that cannot is skipped with a warning: a run does not need it."""
    for component in kernel.registry.all(_KIND):
        try:
            yield component, component.load_target()()
        except NxdtError as error:
            _log.warning("The migration %r of %s is skipped: %s", component.record.name, component.dist, error.what())
