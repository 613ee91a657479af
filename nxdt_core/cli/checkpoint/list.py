"""``nxdt checkpoint list``."""

from __future__ import annotations

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, look
from nxdt_core.cli.table import human_size, print_table, shade
from nxdt_core.cli.verb import Verb, as_json, print_json

__all__ = ["list_"]


@click.command(
    "list", cls=Verb, examples=(f"nxdt checkpoint list {EXAMPLE_URI}", f"nxdt checkpoint list {EXAMPLE_URI} --json")
)
@click.argument("uri")
@as_json
def list_(uri: str, json_output: bool) -> None:
    """List the checkpoints at URI: committed, unfinished and damaged ones.

    Missing files and wrong sizes are seen here; changed bytes are found by `verify`, which reads them all.
    """
    _, found = look(uri)
    if json_output:
        keys = ("step", "state", "uri", "size_bytes")
        print_json([{key: getattr(status, key) for key in keys} for status in found])
    elif found:
        rows = [
            (str(s.step), shade(s.state), human_size(s.size_bytes), s.uri + (f"\n{s.problem}" if s.problem else ""))
            for s in found
        ]
        print_table(("STEP", "STATE", "SIZE", "URI"), rows, right=("STEP", "SIZE"))
    else:
        click.echo(f"No checkpoint lies at {uri}.", err=True)
