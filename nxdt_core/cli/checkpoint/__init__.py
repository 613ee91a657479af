"""``nxdt checkpoint``: one file a verb, imported when it is called."""

from __future__ import annotations

import click

from nxdt_core.cli.verb import LazyCommand, SuggestingGroup

VERBS = {
    name: LazyCommand(f"nxdt_core.cli.checkpoint.{target}", summary)
    for name, target, summary in (
        ("list", "store:list_", "List the checkpoints at URI, and whether they are committed."),
        ("inspect", "store:inspect", "Show what a checkpoint contains."),
        ("verify", "store:verify", "Check that checkpoints are whole."),
        ("diff", "diff:diff", "Compare two checkpoints."),
        ("copy", "copy:copy", "Copy checkpoints to another store."),
        ("prune", "store:prune", "Delete old checkpoints."),
        ("export", "convert:export", "Write the model of a checkpoint for transformers or llama.cpp."),
        ("import", "convert:import_", "Import a model that another program has saved."),
    )
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
