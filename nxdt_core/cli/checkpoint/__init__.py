"""``nxdt checkpoint``: one file a verb, imported when it is called."""

from __future__ import annotations

import click

from nxdt_core.cli.groups import LazyCommand, SuggestingGroup

VERBS = {
    "list": LazyCommand(
        target="nxdt_core.cli.checkpoint.list:list_",
        summary="List the checkpoints at URI, and whether they are committed.",
    ),
    "inspect": LazyCommand(
        target="nxdt_core.cli.checkpoint.inspect:inspect", summary="Show what a checkpoint contains."
    ),
    "verify": LazyCommand(target="nxdt_core.cli.checkpoint.verify:verify", summary="Check that checkpoints are whole."),
    "diff": LazyCommand(target="nxdt_core.cli.checkpoint.diff:diff", summary="Compare two checkpoints."),
    "copy": LazyCommand(target="nxdt_core.cli.checkpoint.copy:copy", summary="Copy checkpoints to another store."),
    "prune": LazyCommand(target="nxdt_core.cli.checkpoint.prune:prune", summary="Delete old checkpoints."),
    "export": LazyCommand(
        target="nxdt_core.cli.checkpoint.export:export",
        summary="Write the model of a checkpoint for transformers or llama.cpp.",
    ),
    "import": LazyCommand(
        target="nxdt_core.cli.checkpoint.import_:import_",
        summary="Import a model that another program has saved.",
    ),
}
"""The verbs, in the order of the help text."""


@click.group(
    cls=SuggestingGroup,
    lazy=VERBS,
    short_help="List, check, compare, copy, export and import checkpoints.",
    examples=(
        "nxdt checkpoint list nxdt_experiments/llama-tiny/checkpoints",
        "nxdt checkpoint copy nxdt_experiments/llama-tiny/checkpoints s3://my-bucket/llama-tiny",
    ),
)
def checkpoint() -> None:
    """Inspect, copy and convert checkpoints.

    URI is what checkpoint.uri says: a directory, or an address of an installed store. Most commands also take the
    address of one step: URI/step-00000100.
    """
