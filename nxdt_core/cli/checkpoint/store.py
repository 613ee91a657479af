"""Shared code of checkpoint commands: the store and checkpoints that an address means, and work on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import click

from nxdt_core.cli.verb import print_json, print_note, say

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointStatus, Manifest, Ownership
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.protocols.ranks import RankAgreement
    from nxdt_core.protocols.store import CheckpointStore
    from nxdt_core.train.weights.export import Exported
    from nxdt_core.train.weights.importing import Imported

__all__ = [
    "EXAMPLE_URI",
    "file_threads",
    "located",
    "look",
    "look_for_committed",
    "named_config",
    "on_all_ranks",
    "open_one",
    "own_for",
    "print_report",
    "trusted_keys",
]


EXAMPLE_URI = "nxdt_experiments/llama-tiny/checkpoints"
"""Checkpoint directory of the documentation's first run; help texts use it in their examples."""

file_threads = click.option(
    "--threads", default=8, show_default=True, type=click.IntRange(1, 256), help="Files to read at the same time."
)

trusted_keys = click.option(
    "--trusted",
    multiple=True,
    metavar="FILE",
    help="Require a signature of this Ed25519 public key (PEM); of any of them where several are given.",
)


named_config = click.option(
    "--config",
    metavar="FILE",
    help="Configuration of the run, for what a checkpoint may not decide: plugin files, variables, addresses.",
)


def look(uri: str) -> tuple[CheckpointStore, list[CheckpointStatus]]:
    """Return the store that an address names, and the steps in it: all steps, or the one that the address ends with."""
    from nxdt_core.checkpoint import list_checkpoints

    storage, step = located(uri)
    return storage, list_checkpoints(storage, step)


def look_for_committed(uri: str) -> tuple[CheckpointStore, list[CheckpointStatus]]:
    """Return the store and its steps as :func:`look` does, without unfinished steps.

    Raises:
        CheckpointNotFound: nothing is left; the error says what is there instead.
    """
    from nxdt_core.checkpoint.read.status import nothing_at
    from nxdt_core.errors.checkpoints import CheckpointNotFound

    storage, found = look(uri)
    finished = [status for status in found if status.state != "unfinished"]
    if not finished:
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, found))
    return storage, finished


def open_one(uri: str) -> tuple[CheckpointStore, Manifest]:
    """Return the checkpoint that an address ends with, or else the newest committed one there.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointDamaged: its manifest is not what was written.
        CheckpointTooNew: a later version wrote it.
    """
    from nxdt_core.checkpoint import list_checkpoints, read_manifest
    from nxdt_core.checkpoint.read.status import newest_first, nothing_at
    from nxdt_core.errors.checkpoints import CheckpointNotFound

    storage, step = located(uri)
    newest = next((status.step for status in newest_first(storage, step) if status.state != "unfinished"), None)
    if newest is None:
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, list_checkpoints(storage, step)))
    return storage, read_manifest(storage, newest)


def located(uri: str) -> tuple[CheckpointStore, int | None]:
    """Return the store and the step that an address names: of a run's directory, its checkpoints."""
    from nxdt_core.checkpoint import locate
    from nxdt_core.checkpoint.write.retention import with_best

    return with_best(uri, locate)


def own_for(command: str, storage: CheckpointStore) -> AbstractContextManager[Ownership]:
    """Keep runs and other commands from writing to ``storage`` for a block.

    Raises:
        StoreInUse: a run or another command writes to it.
    """
    from nxdt_core.checkpoint import owned

    return owned(storage, run=f"nxdt checkpoint {command}", say=lambda line: say(line, err=True))


def print_report(done: Exported | Imported, sentence: str, json_output: bool) -> None:
    """Print what an export or an import did, and its notes."""
    if json_output:
        print_json(asdict(done))
        return
    say(sentence)
    for note in done.notes:
        print_note(note)


_T = TypeVar("_T")


def on_all_ranks(work: Callable[[RankAgreement | None], _T], report: Callable[[_T], None]) -> int:
    """Call ``work`` as one of the processes that a launcher has started, or alone; rank 0 reports.

    Returns:
        The exit status. The failure of one rank ends all of them, and is reported once.
    """
    from nxdt_core.launch.joining import find_place

    place = find_place()
    if place.world_size == 1:
        report(work(None))
        return 0
    from nxdt_core.distributed.devices import HOST
    from nxdt_core.distributed.process_group import Ranks
    from nxdt_core.launch.rank import as_rank

    def run(client: Client) -> int:
        ranks = Ranks(place)
        ranks.start(HOST)
        result = work(ranks)
        if client.is_first:
            report(result)
        ranks.stop()
        return 0

    return as_rank(place, run)
