"""``nxdt checkpoint``: what lies in a store, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.table import human_size, print_table, shade
from nxdt_core.cli.verb import VerbGroup, as_json, print_json

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointStatus
    from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["checkpoint"]

_RUN = "nxdt_experiments/llama-tiny/checkpoints"


@click.group(
    cls=VerbGroup,
    short_help="List and verify checkpoints.",
    examples=(f"nxdt checkpoint list {_RUN}", f"nxdt checkpoint verify {_RUN}"),
)
def checkpoint() -> None:
    """Look at checkpoints. URI is what checkpoint.uri says: a directory, or an address of an installed store."""


@checkpoint.command("list", examples=(f"nxdt checkpoint list {_RUN}", f"nxdt checkpoint list {_RUN} --json"))
@click.argument("uri")
@as_json
def list_(uri: str, json_output: bool) -> None:
    """List the checkpoints at URI: committed, unfinished and damaged ones.

    Missing files and wrong sizes are seen here; changed bytes are found by `verify`, which reads them all.
    """
    _, found = _look(uri)
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


@checkpoint.command(
    "verify", examples=(f"nxdt checkpoint verify {_RUN}", f"nxdt checkpoint verify {_RUN}/step-00000040")
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

    storage, found = _look(uri)
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


def _look(uri: str) -> tuple[CheckpointStorage, list[CheckpointStatus]]:
    """The store that an address names, and what lies there: all steps, or the one that the address ends with."""
    from nxdt_core.checkpoint import list_checkpoints, locate
    from nxdt_core.kernel import Kernel

    storage, step = locate(uri, Kernel.start())
    return storage, [status for status in list_checkpoints(storage) if step in (None, status.step)]
