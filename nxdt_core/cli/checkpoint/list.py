"""``nxdt checkpoint list``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, look
from nxdt_core.cli.terminal import human_size, print_table, print_wrapped, shade
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nxdt_core.checkpoint import CheckpointStatus


_METRICS_SHOWN = 2
_HEADER = ("STEP", "TIME (UTC)", "STATE", "ARCHIVE", "SIZE", "MESH", "METRICS", "PROBLEM")


@click.command(
    "list",
    cls=Verb,
    examples=(f"nxdt checkpoint list {EXAMPLE_URI}", f"nxdt checkpoint list {EXAMPLE_URI} --json"),
)
@click.argument("uri")
@as_json
def list_(uri: str, json_output: bool) -> None:
    """List the checkpoints at URI: committed, unfinished and damaged ones.

    URI may also be the directory of a run, or name one step, or `best`: the one that checkpoint.monitor ranks first.

    Missing files and wrong sizes are seen here; changed bytes are found by `verify --deep`, which reads them all.
    """
    from nxdt_core.checkpoint.read.status import nothing_at, with_archive_states

    storage, found = look(uri)
    found = with_archive_states(storage, found)
    if json_output:
        print_json([_facts(status) for status in found])
    elif found:
        print_wrapped("checkpoints", storage.uri)
        print_table(_HEADER, [_row(each) for each in found], right=("STEP", "SIZE"), optional=("METRICS", "MESH"))
    else:
        say(f"There is no checkpoint at {uri}: {nothing_at(storage, found)}.", err=True)


def _facts(status: CheckpointStatus) -> dict[str, object]:
    facts = status.facts
    return {
        "step": status.step,
        "state": status.state,
        "uri": status.uri,
        "size_bytes": status.size_bytes,
        "created": status.created or None,
        "mesh": dict(facts.mesh) if facts else {},
        "metrics": dict(facts.metrics) if facts else {},
        "consumed_samples": facts.consumed_samples if facts else None,
        "consumed_tokens": facts.consumed_tokens if facts else None,
        "problem": status.problem or None,
        "archive": status.archive or None,
        "signed_by": status.signed_by or None,
    }


def _row(status: CheckpointStatus) -> tuple[str, ...]:
    facts = status.facts
    return (
        str(status.step),
        status.created[:19].replace("T", " "),
        shade(status.state),
        status.archive,
        human_size(status.size_bytes),
        _mesh(facts.mesh) if facts else "",
        _metrics(facts.metrics) if facts else "",
        status.problem,
    )


def _mesh(mesh: Mapping[str, int]) -> str:
    """``dp2 tp4``; dimensions of size 1 are left out."""
    return " ".join(f"{name}{size}" for name, size in mesh.items() if size > 1)


def _metrics(metrics: Mapping[str, float]) -> str:
    """``loss=2.671 val_loss=2.728``; of a run that has neither losses nor rewards, what it saved first."""
    names = [name for name in metrics if name.endswith(("loss", "reward"))] or list(metrics)
    return " ".join(f"{name}={metrics[name]:.4g}" for name in names[:_METRICS_SHOWN])
