"""Pages of the documentation about recipes, from what ``scripts/gallery.py`` wrote: plans of all, curves of some."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from typing import Any

from gallery import DATA, PLANS, RUNS, STEPS

from nxdt_core.cli.report_plot import plot
from nxdt_core.cli.terminal import human_size
from nxdt_core.config.sources import Recipe, list_recipes
from nxdt_core.kernel import Kernel

PLUGINS = {
    "llama": "Llama and Mistral",
    "mixtral": "Mixtral",
    "gpt": "GPT",
    "hf": "Models of transformers",
    "hf_data": "Directories of the datasets library",
    "megatron_data": "Megatron's indexed files",
    "sft_chat": "Fine-tuning on conversations",
    "lora": "LoRA",
    "preference": "Preferences and reward models",
    "grpo": "GRPO",
    "distill": "Distillation",
}
"""Plugin → title of the page of its recipes."""

_BEGINNING = """\
# Recipe gallery

A recipe is a complete configuration that a plugin ships. `nxdt train recipe:NAME` trains it, and
`nxdt recipes show NAME > my_run.yaml` prints it as a start for your own. The small recipes train on a CPU, and their
loss curves below are from our own runs. The large recipes have a plan of their memory. **We have not run them**: one
GPU has run other shapes, and no Trainium device has run nxdt yet.

## Trained by us on a CPU

Loss over steps: the solid line is the training loss, the dashed line with dots the validation loss. Each recipe's
section has the commit, machine and date of the run, and the values as CSV. The models and datasets are tiny.
"""

_LARGE = (
    "nxdt recipes show {name} > my_run.yaml",
    "nxdt config check my_run.yaml   # names the paths to set",
    "nxdt train my_run.yaml",
)
"""Commands for a recipe that needs data of the reader's own."""


_STYLE = """\
.panel{fill:#fff;stroke:#cfd8d8}.grid{stroke:#eceff1}text{font:12px system-ui,sans-serif;fill:#455a64}
polyline{fill:none;stroke:#00897b;stroke-width:2}circle{fill:#00897b}
.s1 polyline{stroke:#e65100}.s1 circle{fill:#e65100}
@media (prefers-color-scheme:dark){.panel{fill:#1e2129;stroke:#3c424d}.grid{stroke:#3c424d}text{fill:#b0bec5}
polyline{stroke:#4db6ac}circle{fill:#4db6ac}.s1 polyline{stroke:#ffb74d}.s1 circle{fill:#ffb74d}}"""


def loss_image(name: str) -> str:
    """Return the loss curves of a recipe as an SVG file."""
    panel = '<rect class="panel" x="0.5" y="0.5" width="419" height="229" rx="8"/>'
    head, begin, curves = _picture(name).partition(">")
    return (
        head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
        + f"{begin}<style>{_STYLE}</style>{panel}{curves}"
    )


def gallery_pages(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of the gallery, and of a page for the recipes of each plugin."""
    plans, runs = json.loads(PLANS.read_text()), json.loads(RUNS.read_text())
    recipes = [recipe for recipe in list_recipes(kernel) if recipe.name in plans]
    by_plugin = {plugin: [recipe for recipe in recipes if recipe.plugin == plugin] for plugin in PLUGINS}
    yield "reference/recipes.md", "\n".join(_gallery(by_plugin, plans, runs))
    for plugin, own in by_plugin.items():
        yield f"reference/recipes/{plugin}.md", "\n".join(_page(plugin, own, plans, runs))


def _gallery(by_plugin: Mapping[str, list[Recipe]], plans: Mapping[str, Any], runs: Mapping[str, Any]) -> Iterator[str]:
    yield from (_BEGINNING, '<div class="gallery" markdown>', "")
    for plugin, recipes in by_plugin.items():
        for recipe in recipes:
            if recipe.name in runs:
                link = f"**[`{recipe.name}`](recipes/{plugin}.md#{recipe.name})**"
                yield from ("<div markdown>", f"{link}: {recipe.summary}", "", _picture(recipe.name), "</div>")
    yield from ("</div>", "", "## All recipes", "")
    for plugin, recipes in by_plugin.items():
        yield from (f"### {PLUGINS[plugin]}", "")
        yield from ("| Recipe | Trains | Layout | Memory per rank | Run by us |", "|---|---|---|---|---|")
        for recipe in recipes:
            plan, run = plans[recipe.name], runs.get(recipe.name)
            cells = (
                f"[`{recipe.name}`](recipes/{plugin}.md#{recipe.name})",
                recipe.summary.rstrip("."),
                _layout(plan),
                human_size(plan["memory_bytes"]),
                f"{run['date']}, CPU" if run else "no",
            )
            yield f"| {' | '.join(cells)} |"
        yield ""


def _page(plugin: str, recipes: list[Recipe], plans: Mapping[str, Any], runs: Mapping[str, Any]) -> Iterator[str]:
    dist = f"nxdt-plugin-{plugin.replace('_', '-')}"
    yield from (f"# Recipes: {PLUGINS[plugin]}", "")
    yield f"The recipes of [`{dist}`](../plugins/{plugin}.md), with the plan of each. The plan is what `nxdt plan`"
    yield "computes: the peak memory of the fullest rank, and the size of a checkpoint."
    yield from ("The [recipe gallery](../recipes.md) lists the recipes of all plugins.", "")
    for recipe in recipes:
        run = runs.get(recipe.name)
        yield from (f"## {recipe.name} {{ #{recipe.name} }}", "", recipe.summary, "")
        yield from (f"- **{key}**: {value}" for key, value in _facts(plans[recipe.name]))
        yield ""
        commands = STEPS.get(recipe.name, _LARGE)
        yield from ("```sh", *(line.format(name=recipe.name) for line in commands), "```", "")
        yield from _ran(recipe.name, run) if run else ("Not run by us: the numbers are those of the plan.", "")


def _facts(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    trained = plan["trained_parameters"]
    part = f", {_count(trained)} of them trained" if trained != plan["parameters"] else ""
    yield "Model", f"`{plan['model']}`, {_count(plan['parameters'])} parameters{part}"
    yield "Data", f"`{plan['data']}`, {plan['sequences_per_step']:,} sequences of {plan['sequence']:,} tokens per step"
    yield "Steps", f"{plan['steps']:,}"
    yield "Layout", _layout(plan) + (f" · {plan['nodes']} nodes" if plan["nodes"] > 1 else "")
    idle = f", pipeline bubble {100 * plan['pipeline_bubble']:.1f} %" if plan["pipeline_bubble"] else ""
    flops = _count(plan["flops_per_token"], "G")
    sizes = f"{human_size(plan['memory_bytes'])} per rank, checkpoint {human_size(plan['checkpoint_bytes'])}"
    yield "Plan", f"{sizes}, {flops[:-1]} {flops[-1]}FLOP per token{idle}"


def _ran(name: str, run: Mapping[str, Any]) -> Iterator[str]:
    rows = _rows(name)
    yield from ('<div class="gallery one">', _picture(name), "</div>", "")
    losses = [row["loss"] for row in rows if "loss" in row]
    validations = [row["validation_loss"] for row in rows if "validation_loss" in row]
    last = f" Validation loss at the end: {validations[-1]:.3f}." if validations else ""
    yield f"Training loss: {losses[0]:.3f} at the first logged step, {losses[-1]:.3f} at the last.{last}"
    yield f"[Values as CSV](../../gallery/{name}.csv)."
    yield ""
    where = f"{run['cpu_seconds']} CPU-seconds in all on {run['machine']}, with {run['versions']}"
    yield from (f"Run by us on {run['date']} at commit `{run['commit']}`: {where}.", "")


def _picture(name: str) -> str:
    rows = _rows(name)
    lines = [
        (number, title, {int(row["step"]): row[column] for row in rows if column in row})
        for number, (column, title) in enumerate((("loss", "training"), ("validation_loss", "validation")))
    ]
    picture = plot(lines, label=f"Loss of {name} over steps")
    return "" if picture is None else picture.html


def _rows(name: str) -> list[dict[str, float]]:
    with (DATA / f"{name}.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def _layout(plan: Mapping[str, Any]) -> str:
    return " · ".join(plan["layout"])


def _count(number: float, billion: str = "B") -> str:
    for size, letter in ((1e12, "T"), (1e9, billion), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"
