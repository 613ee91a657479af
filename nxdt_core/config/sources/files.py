"""Where the YAML comes from: a file, a recipe of a plugin, or a mapping in memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxdt_core.config.sources.node import Node, Origin, Place, from_plain
from nxdt_core.config.sources.paths import expand_home
from nxdt_core.config.sources.recipes import RECIPE_SCHEME, find_recipe, list_recipes
from nxdt_core.config.sources.yaml_text import parse_yaml
from nxdt_core.errors.configuration import (
    ConfigFileNotFound,
    ConfigProblem,
    ConfigUnreadable,
    UnknownRecipe,
    WrongValue,
    YamlSyntax,
    YamlTooLarge,
)
from nxdt_core.kernel import Kernel

__all__ = ["Source", "file_problem", "read_source"]


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
        return _checked(label, from_plain(source, Origin(kind="file", where=label)), [])
    label = str(source)
    named = named or Place(place=label, line=0, key="")
    if label.startswith(RECIPE_SCHEME):
        try:
            recipe = find_recipe(find_kernel(), label.removeprefix(RECIPE_SCHEME))
        except UnknownRecipe as unknown:
            found = {name: getattr(unknown, name) for name in ("reason", "candidates", "advice")}
            return _failed(label, UnknownRecipe(**named, **found))
        return replace(_parsed(label, recipe.text, recipe.path.parent.absolute()), stem=recipe.name)
    path = expand_home(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        return _failed(label, file_problem(path, error, named, find_kernel))
    return replace(_parsed(label, text, path.absolute().parent), path=path, stem=path.stem)


def _parsed(label: str, text: str, directory: Path) -> Source:
    tree, problems = parse_yaml(text, label, directory)
    if problems and isinstance(problems[0], (YamlSyntax, YamlTooLarge)):
        return _failed(label, problems[0])
    return _checked(label, tree, problems)


def _checked(label: str, tree: Node, problems: list[ConfigProblem]) -> Source:
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
        return ConfigFileNotFound(**place, path=str(path), candidates=meant or _near(path))
    if isinstance(error, UnicodeDecodeError):
        reason = f"byte {error.start} is no UTF-8"
    else:
        said = getattr(error, "strerror", None) or str(error)
        reason = said[:1].lower() + said[1:]
    return ConfigUnreadable(**place, path=str(path), reason=reason)


def _near(path: Path) -> tuple[str, ...]:
    """Return files next to a missing one with similar names."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ()
    return tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3))
