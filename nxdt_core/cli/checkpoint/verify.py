"""``nxdt checkpoint verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, file_threads, look_for_committed
from nxdt_core.cli.progress import byte_bar
from nxdt_core.cli.table import print_table, shade
from nxdt_core.cli.verb import Verb, as_json, print_json

if TYPE_CHECKING:
    from nxdt_core.checkpoint.status import Depth

__all__ = ["verify"]


@click.command(
    cls=Verb,
    short_help="Check that checkpoints are whole.",
    examples=(
        f"nxdt checkpoint verify {EXAMPLE_URI}",
        f"nxdt checkpoint verify {EXAMPLE_URI}/step-00000040 --deep",
    ),
)
@click.argument("uri")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@file_threads
@as_json
@click.pass_context
def verify(ctx: click.Context, uri: str, deep: bool, threads: int, json_output: bool) -> None:
    """Check the committed checkpoints at URI: manifests, files, their sizes and the files of their digests.

    With --deep every byte is read and compared with its digest: nothing else finds a changed one. URI may name
    one step. Exit status 1 where anything is damaged.
    """
    from nxdt_core.checkpoint.status import find_problems

    storage, found = look_for_committed(uri)
    depth: Depth = "bytes" if deep else "digests"
    problems = {}
    for status in found:
        with byte_bar(status.size_bytes if deep else 0, f"step {status.step}") as progress:
            problems[status.step] = find_problems(storage, status.step, depth, threads=threads, progress=progress)
    if json_output:
        print_json([{"step": step, "problems": bad} for step, bad in problems.items()])
    else:
        too_new = {status.step for status in found if status.state == "committed" and status.problem}
        rows = [
            (str(step), shade("too new" if step in too_new else "damaged" if bad else "ok"), "\n".join(bad))
            for step, bad in problems.items()
        ]
        print_table(("STEP", "STATE", "PROBLEMS"), rows, right=("STEP",))
    ctx.exit(1 if any(problems.values()) else 0)
