"""``nxdt checkpoint prune``."""

from __future__ import annotations

import sys

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, located, own_for
from nxdt_core.cli.verb import Verb, as_json, print_json


@click.command(
    cls=Verb,
    examples=(
        f"nxdt checkpoint prune {EXAMPLE_URI} --keep-last 3 --dry-run",
        f"nxdt checkpoint prune {EXAMPLE_URI} --keep-last 3",
    ),
)
@click.argument("uri")
@click.option("--keep-last", required=True, type=click.IntRange(min=1), help="Newest committed checkpoints to keep.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask on a terminal.")
@as_json
def prune(uri: str, keep_last: int, dry_run: bool, yes: bool, json_output: bool) -> None:
    """Delete all steps at URI that are older than the newest ones that are kept.

    Every byte of one of those kept is read first: while none of them is sound, nothing is deleted. Unfinished and
    damaged steps do not count, and go when they are older; those that a run saved for good (permanent) stay. On a
    terminal it asks. While a run saves to URI, it refuses.
    """
    from nxdt_core.checkpoint import delete_step, list_checkpoints
    from nxdt_core.checkpoint.read.status import nothing_at
    from nxdt_core.checkpoint.storage import explained_os_errors
    from nxdt_core.checkpoint.write.retention import plan_prune
    from nxdt_core.errors.checkpoints import CheckpointNotFound, NoSoundCheckpoint

    storage, step = located(uri)
    if step is not None:
        raise click.BadParameter(f"{uri!r} names one step; name the address of all of them.", param_hint="'URI'")
    found = list_checkpoints(storage)
    if not found:
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, found))
    plan = plan_prune(storage, keep_last)
    if plan.keep and not plan.sound:
        kept = ", ".join(map(str, plan.keep))
        raise NoSoundCheckpoint(where=uri, reason=f"no checkpoint there is sound among the steps {kept}")
    if not json_output:
        _print_steps("Keeps", plan.keep)
        _print_steps("Would delete" if dry_run else "Deletes", plan.delete)
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not (yes or dry_run or json_output)
    if plan.delete and asks:
        click.confirm(f"Delete {len(plan.delete)} of the steps at {uri}?", abort=True)
    if plan.delete and not dry_run:
        with own_for("prune", storage) as ownership, explained_os_errors(storage.uri):
            for to_delete in plan.delete:
                ownership.check()
                delete_step(storage, to_delete)
    if json_output:
        print_json({"keep": plan.keep, "delete": plan.delete, "deleted": not dry_run})


def _print_steps(what: str, steps: tuple[int, ...]) -> None:
    listed = ", ".join(map(str, steps)) or "nothing"
    click.echo(f"{what} {listed}." if not steps else f"{what} {'step' if len(steps) == 1 else 'steps'} {listed}.")
