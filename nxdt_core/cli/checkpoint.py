"""``nxdt checkpoint``: what lies in a store, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.table import human_size, print_table, shade
from nxdt_core.cli.verb import VerbGroup, as_json, print_json

if TYPE_CHECKING:
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

    Damage that shows without reading all bytes is seen here; `verify` reads them all.
    """
    from nxdt_core.checkpoint import list_checkpoints

    found = list_checkpoints(_open(uri))
    if json_output:
        keys = ("step", "state", "uri", "size_bytes")
        print_json([{key: getattr(status, key) for key in keys} for status in found])
    elif found:
        rows = [(str(s.step), shade(s.state), human_size(s.size_bytes), s.uri) for s in found]
        print_table(("STEP", "STATE", "SIZE", "URI"), rows, right=("STEP", "SIZE"))
    else:
        click.echo(f"No checkpoint lies at {uri}.", err=True)


@checkpoint.command("verify", examples=(f"nxdt checkpoint verify {_RUN}", f"nxdt checkpoint verify {_RUN} --step 40"))
@click.argument("uri")
@click.option("--step", type=click.IntRange(min=0), help="Verify this step alone.")
@as_json
@click.pass_context
def verify(ctx: click.Context, uri: str, step: int | None, json_output: bool) -> None:
    """Read every byte of the committed checkpoints at URI and compare with their digests.

    Exit status 1 where anything is damaged.
    """
    from nxdt_core.checkpoint import list_checkpoints
    from nxdt_core.checkpoint import verify as problems_of
    from nxdt_core.errors import CheckpointNotFound

    storage = _open(uri)
    steps = [s.step for s in list_checkpoints(storage) if s.state != "unfinished" and step in (None, s.step)]
    if not steps:
        raise CheckpointNotFound(where=uri, reason="nothing committed" if step is None else f"no committed step {step}")
    problems = {step: problems_of(storage, step) for step in steps}
    if json_output:
        print_json([{"step": step, "problems": list(found)} for step, found in problems.items()])
    else:
        rows = [(str(step), shade("damaged" if bad else "ok"), "; ".join(bad)) for step, bad in problems.items()]
        print_table(("STEP", "STATE", "PROBLEMS"), rows, right=("STEP",))
    ctx.exit(1 if any(problems.values()) else 0)


def _open(uri: str) -> CheckpointStorage:
    from nxdt_core.checkpoint import open_storage
    from nxdt_core.kernel import Kernel

    return open_storage(uri, Kernel.start())
