"""``nxdt plugins trace``: which hook implementations a configuration calls, how long they take, what they set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal.table import print_table
from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, say

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig

__all__ = ["trace"]

_SLOWEST = 20
"""Rows of the table."""


@click.command(
    "trace",
    cls=Verb,
    short_help="Show which hook implementations ran, whose, and how long.",
    examples=("nxdt plugins trace recipe:llama-tiny", "nxdt plugins trace my_run.yaml trainer.max_steps=10 --json"),
)
@config_arguments
@as_json
def trace(source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Load CONFIG as a run does, and show each call of a plugin: its hook, how long it took, and what it gave.

    A second table shows the keys whose default came from a plugin. Nothing is trained.
    """
    from nxdt_core.config import load
    from nxdt_core.kernel.hooks import traced_hooks

    with traced_hooks() as calls:
        config = load(source, overrides)
    defaults = _defaults(config)
    if json_output:
        rows = [
            {"hook": each.hook, "plugin": each.plugin, "dist": each.dist, "outcome": each.outcome, "s": each.seconds}
            for each in calls
        ]
        print_json({"calls": rows, "defaults": defaults})
        return
    slowest = sorted(calls, key=lambda each: -each.seconds)[:_SLOWEST]
    table = [(each.hook, each.plugin, f"{1000 * each.seconds:.2f}", each.outcome, each.dist) for each in slowest]
    print_table(("HOOK", "PLUGIN", "MS", "GAVE", "DIST"), table, right=("MS",))
    total = 1000 * sum(each.seconds for each in calls)
    say(f"{len(calls)} calls of {len({(each.dist, each.plugin) for each in calls})} plugins, {total:.1f} ms")
    if defaults:
        say("")
        print_table(("KEY", "PLUGIN", "DEFAULT"), [(row["key"], row["plugin"], str(row["value"])) for row in defaults])


def _defaults(config: ResolvedConfig) -> list[dict[str, Any]]:
    """Return the keys whose value a plugin's hook gave."""
    found = []
    for key, origin in config.origins.items():
        node = config.tree.find(key) if origin.kind == "plugin" else None
        if node is not None and not isinstance(node.value, dict | list):
            value = node.value if node.shown is None else node.shown
            found.append({"key": key, "plugin": origin.where, "value": value})
    return found
