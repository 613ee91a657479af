"""``nxdt recipes``: the ready-made runs that plugins ship."""

from __future__ import annotations

import re
from itertools import groupby
from operator import attrgetter

import click

from nxdt_core.cli.groups import SuggestingGroup
from nxdt_core.cli.terminal import print_table
from nxdt_core.cli.verb import as_json, complete_recipe, print_json, say

_ONE_DEVICE = re.compile(r": 1 accelerator of (\d+) GiB, ")
"""In the summary of a recipe; ``tests/recipes`` plans each in that memory."""


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt recipes list", "nxdt recipes show llama-tiny > my_run.yaml"),
)
def recipes() -> None:
    """List and print recipes: complete configurations that plugins ship, to run or to start from."""


@recipes.command("list", examples=("nxdt recipes list", "nxdt recipes list --device-memory 24"))
@click.option(
    "--device-memory",
    type=click.IntRange(min=1),
    metavar="GIB",
    help="Only recipes for one accelerator, with at most this much memory.",
)
@as_json
def list_(device_memory: int | None, json_output: bool) -> None:
    """List the recipes of the installed plugins."""
    from nxdt_core.config.sources import list_recipes
    from nxdt_core.kernel import Kernel

    found = list_recipes(Kernel.start())
    if device_memory is not None:
        needs = {recipe: _ONE_DEVICE.search(recipe.summary) for recipe in found}
        found = tuple(recipe for recipe, named in needs.items() if named and int(named[1]) <= device_memory)
    if json_output:
        print_json([{"name": r.name, "plugin": r.plugin, "summary": r.summary} for r in found])
    elif found:
        rows: list[tuple[str, str]] = []
        for plugin, own in groupby(sorted(found, key=attrgetter("plugin")), attrgetter("plugin")):
            rows += [(click.style(plugin, bold=True), ""), *((f"  {recipe.name}", recipe.summary) for recipe in own)]
        print_table(("PLUGIN, RECIPE", "SUMMARY"), rows)
    elif device_memory is not None:
        click.echo(f"No installed recipe is for one accelerator of {device_memory} GiB or less.", err=True)
    else:
        click.echo("No installed plugin ships a recipe; 'nxdt plugins list' shows the plugins.", err=True)


@recipes.command("show", examples=("nxdt recipes show llama-tiny", "nxdt recipes show llama-tiny > my_run.yaml"))
@click.argument("name", shell_complete=complete_recipe)
@as_json
def show(name: str, json_output: bool) -> None:
    """Print the YAML of a recipe, below a line by which editors complete and check its keys.

    The line names the file that `nxdt config schema > nxdt.schema.json` writes into the same directory.
    """
    from nxdt_core.config.sources import EDITOR_LINES, find_recipe
    from nxdt_core.kernel import Kernel

    recipe = find_recipe(Kernel.start(), name.removeprefix("recipe:"))
    if json_output:
        about = {"name": recipe.name, "plugin": recipe.plugin, "summary": recipe.summary}
        print_json({**about, "yaml": recipe.text})
        return
    text = recipe.text.removeprefix(EDITOR_LINES)
    say(f"{EDITOR_LINES}{text}", end="" if text.endswith("\n") else "\n")
