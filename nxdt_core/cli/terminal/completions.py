"""What completes the arguments of commands that take a configuration, a recipe, a plugin or an error code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_override", "complete_plugin", "complete_recipe", "complete_source"]


def complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return recipes with their prefix, and let the shell complete files."""
    recipes = [f"recipe:{name}" for name in _recipes()]
    found = [CompletionItem(name) for name in recipes if name.startswith(incomplete)]
    return found if incomplete.startswith("recipe:") else [*found, CompletionItem(incomplete, type="file")]


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of recipes."""
    return [CompletionItem(name) for name in _recipes() if name.startswith(incomplete)]


def complete_plugin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of plugins."""
    from nxdt_core.kernel import Kernel

    names = dict.fromkeys(plugin.name for plugin in Kernel.start().plugins)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return configuration keys, one section at a time; after ``key=`` the values that are known."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={each}") for each in _values(key) if each.startswith(value)]
    section = key.rpartition(".")[0]
    return [CompletionItem(each, type="open") for each in _keys(section) if each.startswith(incomplete)]


def _recipes() -> list[str]:
    from nxdt_core.config.sources import list_recipes
    from nxdt_core.kernel import Kernel

    return [recipe.name for recipe in list_recipes(Kernel.start())]


def _classes(section: str) -> Iterator[type]:
    """The sections with the keys of a section: the core's, and those of all components that it may select."""
    from nxdt_core.config.components import usable_class
    from nxdt_core.config.schema import SLOTS, RunConfig
    from nxdt_core.config.section import keys_of
    from nxdt_core.config.tree import Place
    from nxdt_core.errors import NxdtError
    from nxdt_core.kernel import Kernel

    core: type | None = RunConfig
    for name in section.split(".") if section else ():
        key = keys_of(core).get(name) if core else None
        core = key.section if key else None
    if core:
        yield core
    for slot in SLOTS:
        if slot.section == section:
            for component in Kernel.start().registry.all(slot.kind):
                try:
                    own = usable_class(component, Place(place=component.dist, line=0, key=slot.key))
                except NxdtError:
                    continue  # `nxdt plugins show` says what is wrong with it
                if own is not None:
                    yield own


def _keys(section: str) -> list[str]:
    """Keys of a section as ``section.key=``, and its sections as ``section.name.``."""
    from nxdt_core.config.section import keys_of
    from nxdt_core.config.tree import join

    found = {
        join(section, name) + ("." if key.section else "=")
        for cls in _classes(section)
        for name, key in keys_of(cls).items()
    }
    return sorted(found)


def _values(path: str) -> list[str]:
    """Names of components for a key that selects one; the words or truth values that another key takes."""
    from nxdt_core.config.schema import SLOTS
    from nxdt_core.config.section import keys_of
    from nxdt_core.kernel import Kernel

    for slot in SLOTS:
        if slot.key == path:
            return [component.record.name for component in Kernel.start().registry.all(slot.kind)]
    section, _, name = path.rpartition(".")
    for cls in _classes(section):
        key = keys_of(cls).get(name)
        if key is not None:
            return list(dict.fromkeys(_words(key.json_schema())))
    return []


def _words(schema: Mapping[str, Any]) -> Iterator[str]:
    """The words of a value's JSON Schema."""
    yield from (str(each) for each in schema.get("enum", ()) if each is not None)
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for each in schema.get("anyOf", ()):
        yield from _words(each)
