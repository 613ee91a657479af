"""``nxdt recipes``: the ready-made runs that plugins ship."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import attrgetter

import click

from nxdt_core.cli.terminal import print_table, print_wrapped
from nxdt_core.cli.verb import SuggestingGroup, as_json, complete_recipe, print_json, say
from nxdt_core.config.schema import usable_class
from nxdt_core.config.section import keys_of
from nxdt_core.config.sources import EDITOR_LINES, Recipe, find_recipe, list_recipes
from nxdt_core.config.tree import parse_yaml
from nxdt_core.errors import NxdtError
from nxdt_core.kernel import Kernel

_ONE_DEVICE = re.compile(r": 1 accelerator of (\d+) GiB, ")
"""Phrase in the summary of a recipe; ``tests/recipes`` plans each in that memory."""


@click.group(
    cls=SuggestingGroup,
    examples=("nxdt recipes list", "nxdt recipes show llama-tiny > my_run.yaml"),
)
def recipes() -> None:
    """List and print recipes: complete configurations that plugins ship, to run or to start from."""


@recipes.command(
    "list",
    examples=("nxdt recipes list", "nxdt recipes list --task lora --device-memory 24", "nxdt recipes list --task dpo"),
)
@click.option("--task", help="Only recipes for this task, such as sft; the last line of the whole list names all.")
@click.option(
    "--device-memory",
    type=click.IntRange(min=1),
    metavar="GIB",
    help="Only recipes for one accelerator, with at most this much memory.",
)
@as_json
def list_(task: str | None, device_memory: int | None, json_output: bool) -> None:
    """List the recipes of the installed plugins, first those to start with."""
    kernel = Kernel.start()
    matching = list_recipes(kernel)
    tasks = tasks_of(matching, kernel)
    all_tasks = sorted(set().union(*tasks.values()))
    if task is not None:  # "distillation" means "distill"
        wanted = {name for name in all_tasks if task.lower().replace("-", "").startswith(name)}
        if not wanted:
            raise click.BadParameter(f"no installed recipe is for {task!r}; the tasks are {', '.join(all_tasks)}.")
        matching = tuple(recipe for recipe in matching if wanted & tasks[recipe])
    if device_memory is not None:
        needs = {recipe: _ONE_DEVICE.search(recipe.summary) for recipe in matching}
        matching = tuple(recipe for recipe, named in needs.items() if named and int(named[1]) <= device_memory)
    if json_output:
        print_json([{"name": r.name, "plugin": r.plugin, "summary": r.summary} for r in matching])
    elif matching:
        whole = task is None and device_memory is None
        first = sorted((recipe for recipe in matching if whole and recipe.rank), key=attrgetter("rank"))
        rest = sorted((recipe for recipe in matching if recipe not in first), key=attrgetter("plugin"))
        rows: list[tuple[str, str]] = []
        for title, group in chain([("start here", first)] if first else [], groupby(rest, attrgetter("plugin"))):
            rows += [(click.style(title, bold=True), ""), *((f"  {recipe.name}", recipe.summary) for recipe in group)]
        print_table(("PLUGIN, RECIPE", "SUMMARY"), rows)
        if whole:
            print_wrapped("--task", ", ".join(all_tasks))
    elif device_memory is not None:
        of = "" if task is None else f" for {task}"
        click.echo(f"No installed recipe{of} is for one accelerator of {device_memory} GiB or less.", err=True)
    else:
        click.echo("No installed plugin ships a recipe; 'nxdt plugins list' shows the plugins.", err=True)


def tasks_of(recipes: Sequence[Recipe], kernel: Kernel) -> dict[Recipe, set[str]]:
    """Return what each recipe is for, from the components that it and the recipes below it select.

    That is the objective and its plugin, such as ``dpo`` and ``preference``. Without one, it is ``sft`` where the
    dataset takes a chat template, and else ``pretraining``. An adapter is another task.
    """
    trees = {recipe.name: parse_yaml(recipe.text, recipe.name)[0] for recipe in recipes}

    def selected(name: str, key: str) -> str | None:
        for _ in trees:  # a chain of bases that leads back to its start ends, too
            component_name = trees[name].get(f"{key}.name")
            name = str(trees[name].get("base")).rpartition(":")[2]
            if component_name is not None or name not in trees:
                return component_name and str(component_name)
        return None

    def of(name: str) -> Iterator[str]:
        objective, dataset, adapter = (selected(name, key) for key in ("objective", "data", "adapter"))
        if adapter:
            yield adapter
        with suppress(NxdtError):  # of a component that is not installed or is broken
            if objective:
                yield from (objective, kernel.registry.get("objective", objective).plugin)
            elif dataset:
                component = kernel.registry.get("dataset", dataset)
                section = usable_class(component)
                yield "sft" if section and "chat_template" in keys_of(section) else "pretraining"

    return {recipe: set(of(recipe.name)) for recipe in recipes}


@recipes.command("show", examples=("nxdt recipes show llama-tiny", "nxdt recipes show llama-tiny > my_run.yaml"))
@click.argument("name", shell_complete=complete_recipe)
@as_json
def show(name: str, json_output: bool) -> None:
    """Print the YAML of a recipe, below a line by which editors complete and check its keys.

    The line names the file that `nxdt config schema > nxdt.schema.json` writes into the same directory.
    """
    recipe = find_recipe(Kernel.start(), name.removeprefix("recipe:"))
    text = EDITOR_LINES + recipe.text.removeprefix(EDITOR_LINES)
    if json_output:
        about = {"name": recipe.name, "plugin": recipe.plugin, "summary": recipe.summary}
        print_json({**about, "yaml": text})
        return
    say(text, end="" if text.endswith("\n") else "\n")
