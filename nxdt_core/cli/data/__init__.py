"""``nxdt data``: one file a verb, imported when it is called. Plugins put verbs of their formats into this group."""

from __future__ import annotations

import click

from nxdt_core.cli.groups import LazyGroup
from nxdt_core.cli.lazy import LazyCommand

__all__ = ["VERBS", "data"]

VERBS = {
    "preview": LazyCommand(
        target="nxdt_core.cli.data.preview:preview", summary="Show what a run would train on, token by token."
    ),
}
"""The verbs, in the order of the help text."""


@click.group(
    cls=LazyGroup,
    lazy=VERBS,
    short_help="Preview and prepare training data.",
    examples=("nxdt data preview recipe:llama-tiny", "nxdt data preview my_run.yaml -n 1 --ids"),
)
def data() -> None:
    """Preview and prepare training data."""
