"""``nxdt checkpoint``: one file a verb, imported when it is called."""

from __future__ import annotations

import click

from nxdt_core.cli.verb import LazyCommand, SuggestingGroup

VERBS = {
    "list": LazyCommand(
        "nxdt_core.cli.checkpoint.store:list_", "List the checkpoints at URI, and whether they are committed."
    ),
    "inspect": LazyCommand("nxdt_core.cli.checkpoint.store:inspect", "Show what a checkpoint contains."),
    "verify": LazyCommand("nxdt_core.cli.checkpoint.store:verify", "Check that checkpoints are whole."),
    "diff": LazyCommand("nxdt_core.cli.checkpoint.diff:diff", "Compare two checkpoints."),
    "copy": LazyCommand("nxdt_core.cli.checkpoint.copy:copy", "Copy checkpoints to another store."),
    "prune": LazyCommand("nxdt_core.cli.checkpoint.store:prune", "Delete old checkpoints."),
    "export": LazyCommand(
        "nxdt_core.cli.checkpoint.convert:export", "Write the model of a checkpoint for transformers or llama.cpp."
    ),
    "import": LazyCommand("nxdt_core.cli.checkpoint.convert:import_", "Import a model that another program has saved."),
}
"""The verbs, in the order of the help text."""


@click.group(
    cls=SuggestingGroup,
    lazy=VERBS,
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
