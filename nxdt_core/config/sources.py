"""Where values come from: files, recipes of plugins, what a file is based on, and the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxdt_core.config.tree import Node, Origin, Place, describe_value, from_plain, mapped, parse_yaml, to_plain
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
    recipes = list(_recipes(kernel.plugins))
    plugin, _, short = name.rpartition(":")
    meant = [recipe for recipe in recipes if recipe.name == short and plugin in ("", recipe.plugin)]
    meant.sort(key=lambda recipe: recipe.plugin)
    if len(meant) == 1:
        return meant[0]
    place = f"{RECIPE_SCHEME}{name}"
    if len({recipe.plugin for recipe in meant}) == 1:
        files = " and ".join(f"'{recipe.path}'" for recipe in meant)
        advice = "rename all but one of these files"
        raise UnknownRecipe(place=place, key="", reason=f"{files} are recipes of the same name", advice=advice)
    if meant:
        spelled = tuple(f"{RECIPE_SCHEME}{recipe.plugin}:{recipe.name}" for recipe in meant)
        raise UnknownRecipe(
            place=place, key="", reason="several plugins have a recipe of that name", candidates=spelled
        )
    for unusable in (each for each in kernel.plugins if each.state not in ("ok", "shadowed")):
        own = _recipes([unusable], usable=False) if plugin in ("", unusable.name) else ()
        if any(recipe.name == short for recipe in own):
            reason = f"the recipe {short!r} belongs to a plugin that is not used: {diagnose(unusable)}"
            raise UnknownRecipe(place=place, key="", reason=reason, advice=advise(unusable))
    if dist := missing_dist("recipe", short, kernel.plugins):
        reason, advice = "no installed plugin has a recipe of that name", f"install it: pip install {dist}"
        raise UnknownRecipe(place=place, key="", reason=reason, advice=advice)
    close = difflib.get_close_matches(short, [recipe.name for recipe in recipes], n=3)
    candidates = tuple(f"{RECIPE_SCHEME}{match}" for match in dict.fromkeys(close))
    raise UnknownRecipe(place=place, key="", reason="no plugin has a recipe of that name", candidates=candidates)


def _recipes(plugins: Iterable[PluginInfo], *, usable: bool = True) -> Iterator[Recipe]:
    for plugin in plugins:
        package = plugin.module.partition(":")[0].partition(".")[0] if plugin.state == "ok" or not usable else ""
        if (directory := _package_directory(package)) is not None:
            for path in sorted((directory / "recipes").rglob("*.yaml")):
                yield Recipe(name=path.stem, plugin=plugin.name, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of a configuration, parsed into a tree with positions."""

    label: str
    """What the user named."""
    tree: Node
    problems: tuple[ConfigProblem, ...]
    path: Path | None = None
    """Of a file that was named."""
    stem: str = ""
    """Name of the file or recipe without its ending; empty for a mapping."""
    readable: bool = True
    """False where there is nothing to check, since the text could not be had or parsed."""


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
    if isinstance(source, Mapping):
        label = label or "mapping"
        return _checked(label, from_plain(source, Origin(kind="file", where=label)))
    label = str(source)
    named = named or Place(place=label, line=0, key="")
    if label.startswith(RECIPE_SCHEME):
        try:
            recipe = find_recipe(find_kernel(), label.removeprefix(RECIPE_SCHEME))
        except UnknownRecipe as unknown:
            found = {name: getattr(unknown, name) for name in ("reason", "candidates", "advice")}
            return _failed(label, UnknownRecipe(**named, **found))
        return replace(
            _checked(label, *parse_yaml(recipe.text, label, recipe.path.parent.absolute())), stem=recipe.name
        )
    path = expand_home(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        return _failed(label, file_problem(path, error, named, find_kernel))
    return replace(_checked(label, *parse_yaml(text, label, path.absolute().parent)), path=path, stem=path.stem)


def _checked(label: str, tree: Node, problems: Sequence[ConfigProblem] = ()) -> Source:
    if problems and isinstance(problems[0], (YamlSyntax, YamlTooLarge)):
        return _failed(label, problems[0])
    if not isinstance(tree.value, dict):
        found = "no mapping at the top"
        return _failed(label, WrongValue(**tree.origin.at(""), found=found, allowed="a mapping of keys and values"))
    return Source(label=label, tree=tree, problems=tuple(problems))


def _failed(label: str, problem: ConfigProblem) -> Source:
    tree = Node({}, Origin(kind="file", where=label))
    return Source(label=label, tree=tree, problems=(problem,), readable=False)


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


def read_overrides(overrides: Sequence[str]) -> tuple[list[Node], list[ConfigProblem]]:
    """Return the tree that each ``key.path=value`` sets, and what is wrong with others; values are read as YAML."""
    found = [_override(text) for text in overrides]
    problems = [each for each in found if isinstance(each, ConfigProblem)]
    return [each for each in found if isinstance(each, Node)], problems


def _override(text: str) -> Node | ConfigProblem:
    path, equals, value = text.partition("=")
    if not equals:
        return _bad(text, "it has no '='")
    if not _PATH.fullmatch(path):
        return _bad(text, f"{path!r} is not a key path")
    document, problems = parse_yaml(f"value: {value}", COMMAND_LINE.where)
    if problems or "value" not in document.children:
        return _bad(f"{path}=…", _reason(problems))  # the value may hold a secret
    return Node({}, COMMAND_LINE).set(
        path,
        mapped(
            document.children["value"], lambda each: replace(each, origin=replace(COMMAND_LINE, text=each.origin.text))
        ),
    )


def _reason(problems: list[ConfigProblem]) -> str:
    if not problems:
        return "the value is empty"
    problem = problems[0]
    if isinstance(problem, YamlSyntax):
        return f"the value is not valid YAML: {problem.reason}"
    return f"the value cannot be used: {problem.what().rstrip('.')}"


def _bad(text: str, reason: str) -> ConfigProblem:
    return BadOverride(place=COMMAND_LINE.where, key="", text=text, reason=reason)


BASE = "base"
"""The key that names what a source is based on."""


def find_base(node: Node, seen: Sequence[str]) -> str | ConfigProblem:
    """Return the source that ``base`` names; a problem where it names none, or one of ``seen``, which need it."""
    text, allowed = node.value, f"the path of a YAML file, or {RECIPE_SCHEME}NAME"
    if not isinstance(text, str):
        return WrongValue(**node.origin.at(BASE), found=describe_value(to_plain(node)), allowed=allowed)
    try:
        named = text if text.startswith(RECIPE_SCHEME) else str(resolve_path(text, node.origin.directory))
    except PackageNotFound as error:
        return WrongValue(**node.origin.at(BASE), found=f"{text!r}, but {error}", allowed=allowed)
    if named in seen:
        found = f"{text!r}, which is itself based on this file"
        return WrongValue(**node.origin.at(BASE), found=found, allowed="a file that is not")
    return named
