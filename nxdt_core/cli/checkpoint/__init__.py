"""``nxdt checkpoint``: one file a verb, imported when it is called."""

from __future__ import annotations

import click

from nxdt_core.cli.lazy import LazyCommand, LazyGroup

__all__ = ["VERBS", "checkpoint"]

VERBS = {
    "list": LazyCommand(
        target="nxdt_core.cli.checkpoint.list:list_",
        summary="List the checkpoints at URI: committed, unfinished and damaged ones.",
    ),
    "verify": LazyCommand(
        target="nxdt_core.cli.checkpoint.verify:verify",
        summary="Read every byte of the committed checkpoints at URI and compare it with the digests.",
    ),
    "export": LazyCommand(
        target="nxdt_core.cli.checkpoint.export:export",
        summary="Write the model of a checkpoint as a directory that transformers loads.",
    ),
}
"""The verbs, in the order of the help text."""


@click.group(
    cls=LazyGroup,
    lazy=VERBS,
    short_help="List and verify checkpoints.",
    examples=(
        "nxdt checkpoint list nxdt_experiments/llama-tiny/checkpoints",
        "nxdt checkpoint verify nxdt_experiments/llama-tiny/checkpoints",
    ),
)
def checkpoint() -> None:
    """Look at checkpoints. URI is what checkpoint.uri says: a directory, or an address of an installed store."""
