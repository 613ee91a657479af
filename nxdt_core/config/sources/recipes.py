"""Ready-made configurations that plugins ship: the YAML files in ``<plugin package>/recipes`` and its folders."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nxdt_core.errors.configuration import UnknownRecipe
from nxdt_core.kernel import Kernel, PluginInfo
from nxdt_core.kernel.plugin import advise, diagnose

__all__ = ["RECIPE_SCHEME", "Recipe", "find_recipe", "list_recipes"]

RECIPE_SCHEME = "recipe:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe that a plugin brings, by name and file."""

    name: str
    """Stem of the file."""
    plugin: str
    path: Path

    @property
    def summary(self) -> str:
        """Return the first comment line of the file; empty where the file does not start with one."""
        first = self.text.lstrip().partition("\n")[0]
        return first.lstrip("#").strip() if first.startswith("#") else ""

    @property
    def text(self) -> str:
        """Return the recipe's YAML."""
        return self.path.read_text(encoding="utf-8")


def list_recipes(kernel: Kernel) -> tuple[Recipe, ...]:
    """Return the recipes of all usable plugins, sorted by name, numbers in it by size, and plugin."""
    return tuple(sorted(_recipes_of_usable(kernel), key=lambda recipe: (_by_size(recipe.name), recipe.plugin)))


def find_recipe(kernel: Kernel, name: str) -> Recipe:
    """Return the recipe called ``name``, or ``plugin:name`` where several plugins have one of that name.

    Raises:
        UnknownRecipe: there is none, there is more than one, or its plugin cannot be used.
    """
    recipes = _recipes_of_usable(kernel)
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
        if plugin in ("", unusable.name) and any(recipe.name == short for recipe in _recipes_of(unusable)):
            reason = f"the recipe {short!r} belongs to a plugin that is not used: {diagnose(unusable)}"
            raise UnknownRecipe(place=place, key="", reason=reason, advice=advise(unusable))
    close = difflib.get_close_matches(short, [recipe.name for recipe in recipes], n=3)
    candidates = tuple(f"{RECIPE_SCHEME}{match}" for match in dict.fromkeys(close))
    raise UnknownRecipe(place=place, key="", reason="no plugin has a recipe of that name", candidates=candidates)


def _recipes_of_usable(kernel: Kernel) -> list[Recipe]:
    return [recipe for plugin in kernel.plugins if plugin.state == "ok" for recipe in _recipes_of(plugin)]


def _recipes_of(plugin: PluginInfo) -> Iterator[Recipe]:
    directory = _package_directory(plugin)
    for path in sorted((directory / "recipes").rglob("*.yaml")) if directory else ():
        yield Recipe(name=path.stem, plugin=plugin.name, path=path)


def _package_directory(plugin: PluginInfo) -> Path | None:
    """Directory of the plugin's import package; None for a single module."""
    package = plugin.module.partition(":")[0].partition(".")[0]
    try:
        spec = find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def _by_size(name: str) -> list[tuple[int, str]]:
    """Sorts ``llama3-8b`` before ``llama3-70b``: a number counts its digits before it is compared."""
    return [(len(part) if part.isdigit() else 0, part) for part in re.findall(r"\d+|\D", name)]
