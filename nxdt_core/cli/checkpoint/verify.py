"""``nxdt checkpoint verify``."""

from __future__ import annotations

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, look
from nxdt_core.cli.table import print_table, shade
from nxdt_core.cli.verb import Verb, as_json, print_json

__all__ = ["verify"]


@click.command(
    cls=Verb,
    examples=(f"nxdt checkpoint verify {EXAMPLE_URI}", f"nxdt checkpoint verify {EXAMPLE_URI}/step-00000040"),
)
@click.argument("uri")
@as_json
@click.pass_context
def verify(ctx: click.Context, uri: str, json_output: bool) -> None:
    """Read every byte of the committed checkpoints at URI and compare it with the digests.

    URI may name one step. Exit status 1 where anything is damaged.
    """
    from nxdt_core.checkpoint import verify as problems_of
    from nxdt_core.errors import CheckpointNotFound

    storage, found = look(uri)
    steps = [status.step for status in found if status.state != "unfinished"]
    if not steps:
        raise CheckpointNotFound(where=uri, reason="nothing there is committed")
    problems = {step: problems_of(storage, step) for step in steps}
    if json_output:
        print_json([{"step": step, "problems": bad} for step, bad in problems.items()])
    else:
        rows = [(str(step), shade("damaged" if bad else "ok"), "\n".join(bad)) for step, bad in problems.items()]
        print_table(("STEP", "STATE", "PROBLEMS"), rows, right=("STEP",))
    ctx.exit(1 if any(problems.values()) else 0)
