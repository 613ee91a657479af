"""Sources of values: files, recipes of plugins, what a file is based on, and the command line."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxdt_core.config.tree import Origin, Place, Tree, describe_value, parse_yaml
from nxdt_core.errors.configuration import (
    BadOverride,
    ConfigFileNotFound,
    ConfigProblem,
    ConfigUnreadable,
    UnknownRecipe,
    WrongValue,
    YamlSyntax,
    YamlTooLarge,
)
from nxdt_core.kernel import Kernel, PluginInfo
from nxdt_core.kernel.plugin import advise, diagnose
from nxdt_core.kernel.registry import missing_dist

__all__ = [
    "BASE",
    "COMMAND_LINE",
    "PACKAGE_SCHEME",
    "RECIPE_SCHEME",
    "PackageNotFound",
    "Recipe",
    "Source",
    "expand_home",
    "file_problem",
    "find_base",
    "find_recipe",
    "list_recipes",
    "read_overrides",
    "read_source",
    "resolve_path",
]

PACKAGE_SCHEME = "package://"


class PackageNotFound(LookupError):
    """The package of a ``package://`` path is not installed, or the path leaves it."""


def expand_home(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home directory; as it is where no user of that name exists."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolve_path(value: str | Path, relative_to: Path | None = None) -> Path:
    """Return the absolute path that ``value`` means; whether it exists is not looked at.

    Args:
        value: A path, ``~/…``, or ``package://<import package>/<path inside it>``.
        relative_to: Directory that a relative path starts at; the working directory by default.

    Raises:
        PackageNotFound: no package of that name is installed, or the path leaves the package.
    """
    text = str(value)
    if text.startswith(PACKAGE_SCHEME):
        package, _, inside = text.removeprefix(PACKAGE_SCHEME).partition("/")
        # The path may come from a checkpoint. To find a package inside another one, Python would import the outer one.
        directory = None if "." in package else _package_directory(package)
        if directory is None:
            raise PackageNotFound(f"no package {package!r} is installed")
        if inside.startswith("/") or ".." in inside.split("/"):
            raise PackageNotFound(f"the path leaves the package {package!r}")
        return directory / inside
    return (relative_to or Path.cwd()).absolute() / expand_home(text)


def _package_directory(package: str) -> Path | None:
    """Return the directory of an import package; None where it is a single module, or not there."""
    try:
        spec = find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


RECIPE_SCHEME = "recipe:"
EDITOR_LINES = """\
# yaml-language-server: $schema=nxdt.schema.json
# Completes keys in editors; `nxdt config schema > nxdt.schema.json` writes it.
"""
"""Beginning of a printed recipe. The path is relative to the file that it is in."""


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
        found = re.search(r"^# Start here: (\d+)$", self.text, re.MULTILINE)
        return int(found[1]) if found else 0

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


def find_recipe(kernel: Kernel, name: str) -> Recipe:
    """Return the recipe called ``name``, or ``plugin:name`` where several plugins have one of that name.

    Raises:
        UnknownRecipe: there is none, there is more than one, or its plugin cannot be used.
    """
    plugin, _, short = name.rpartition(":")
    meant = [recipe for recipe in _recipes(kernel.plugins, short) if plugin in ("", recipe.plugin)]
    meant.sort(key=lambda recipe: recipe.plugin)
    if len(meant) == 1:
        return meant[0]
    others = (each for each in kernel.plugins if each.state not in ("ok", "shadowed") and plugin in ("", each.name))
    reason, advice, candidates = "no plugin has a recipe of that name", "", tuple[str, ...]()
    if len({recipe.plugin for recipe in meant}) == 1:
        files = " and ".join(f"'{recipe.path}'" for recipe in meant)
        reason, advice = f"{files} are recipes of the same name", "rename all but one of these files"
    elif meant:
        reason = "several plugins have a recipe of that name"
        candidates = tuple(f"{RECIPE_SCHEME}{recipe.plugin}:{recipe.name}" for recipe in meant)
    elif unusable := next((each for each in others if any(_recipes([each], short, usable=False))), None):
        reason = f"the recipe {short!r} belongs to a plugin that is not used: {diagnose(unusable)}"
        advice = advise(unusable)
    elif dist := missing_dist("recipe", short, kernel.plugins):
        reason, advice = "no installed plugin has a recipe of that name", f"install it: pip install {dist}"
    else:
        close = difflib.get_close_matches(short, [recipe.name for recipe in _recipes(kernel.plugins)], n=3)
        candidates = tuple(f"{RECIPE_SCHEME}{match}" for match in dict.fromkeys(close))
    place = f"{RECIPE_SCHEME}{name}"
    raise UnknownRecipe(place=place, key="", reason=reason, advice=advice, candidates=candidates)


def _recipes(plugins: Iterable[PluginInfo], name: str | None = None, *, usable: bool = True) -> Iterator[Recipe]:
    """Yield the recipes of plugins, those of one name or all."""
    pattern = "*" if name is None else glob.escape(name)
    for plugin in plugins if "/" not in pattern else ():
        package = plugin.module.partition(":")[0].partition(".")[0] if plugin.state == "ok" or not usable else ""
        if (directory := _package_directory(package)) is not None:
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
    label: str | None = None,
) -> Source:
    """Read and parse; problems are returned, not raised.

    Args:
        source: A path, ``recipe:NAME``, or a mapping.
        find_kernel: Called where a recipe is named; its plugins bring the recipes.
        named: Where the source is named; None: by the user.
        label: What a mapping is called.
    """
    label = (label or "mapping") if isinstance(source, Mapping) else str(source)
    nothing = Tree({}, {(): Origin(kind="file", where=label)})
    problems: Sequence[ConfigProblem] = ()
    path, stem = None, ""
    if isinstance(source, Mapping):
        tree = Tree.of(source, nothing.origins[()])
    else:
        named = named or Place(place=label, line=0, key="")
        try:
            if label.startswith(RECIPE_SCHEME):
                recipe = find_recipe(find_kernel(), label.removeprefix(RECIPE_SCHEME))
                text, stem, directory = recipe.text, recipe.name, recipe.path.parent.absolute()
            else:
                path = expand_home(source)
                text, stem, directory = path.read_text(encoding="utf-8-sig"), path.stem, path.absolute().parent
        except UnknownRecipe as unknown:
            reasons = {name: getattr(unknown, name) for name in ("reason", "candidates", "advice")}
            problem: ConfigProblem = UnknownRecipe(**named, **reasons)
            return Source(label=label, tree=nothing, problems=(problem,), readable=False)
        except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
            problem = file_problem(expand_home(source), error, named, find_kernel)
            return Source(label=label, tree=nothing, problems=(problem,), readable=False)
        tree, problems = parse_yaml(text, label, directory)
    if not isinstance(tree.data, dict):
        place, found = tree.origins[()].at(""), "no mapping at the top"
        problems = [WrongValue(**place, found=found, allowed="a mapping of keys and values")]
        return Source(label=label, tree=nothing, problems=tuple(problems), readable=False)
    readable = not (problems and isinstance(problems[0], (YamlSyntax, YamlTooLarge)))
    return Source(label=label, tree=tree, problems=tuple(problems), path=path, stem=stem, readable=readable)


def file_problem(
    path: Path, error: Exception, place: Place, find_kernel: Callable[[], Kernel] | None = None
) -> ConfigProblem:
    """Return the problem behind an exception of reading a file, with names that are near a missing one.

    With ``find_kernel`` these may be recipes of its plugins.
    """
    if isinstance(error, FileNotFoundError):
        recipes = list_recipes(find_kernel()) if find_kernel else ()
        meant = tuple(f"{RECIPE_SCHEME}{each.name}" for each in recipes if each.name == path.name)
        beside: list[str] = []
        with suppress(OSError):
            beside = sorted(entry.name for entry in path.parent.iterdir())
        near = tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, beside, n=3))
        return ConfigFileNotFound(**place, path=str(path), candidates=meant or near)
    if isinstance(error, UnicodeDecodeError):
        reason = f"byte {error.start} is no UTF-8"
    else:
        said = getattr(error, "strerror", None) or str(error)
        reason = said[:1].lower() + said[1:]
    return ConfigUnreadable(**place, path=str(path), reason=reason)


COMMAND_LINE = Origin(kind="override", where="command line")

_PATH = re.compile(r"[^\s.=\[\]{}]+(\.[^\s.=\[\]{}]+)*")


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


BASE = "base"
"""The key that names what a source is based on."""


def find_base(tree: Tree, seen: Sequence[str]) -> str | ConfigProblem:
    """Return the source that ``base`` names; a problem where it names none, or one of ``seen``, which need it."""
    text, origin, allowed = tree.get(BASE), tree.origin(BASE), f"the path of a YAML file, or {RECIPE_SCHEME}NAME"
    if not isinstance(text, str):
        return WrongValue(**origin.at(BASE), found=describe_value(text), allowed=allowed)
    try:
        named = text if text.startswith(RECIPE_SCHEME) else str(resolve_path(text, origin.directory))
    except PackageNotFound as error:
        return WrongValue(**origin.at(BASE), found=f"{text!r}, but {error}", allowed=allowed)
    if named in seen:
        found = f"{text!r}, which is itself based on this file"
        return WrongValue(**origin.at(BASE), found=found, allowed="a file that is not")
    return named
