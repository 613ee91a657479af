"""``nxdt checkpoint copy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, file_threads, look_for_committed, own_for, trusted_keys
from nxdt_core.cli.terminal import byte_bar, human_size
from nxdt_core.cli.verb import Verb, as_json, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxdt_core.checkpoint import CheckpointStatus
    from nxdt_core.cli.checkpoint.copying import CopyReport
    from nxdt_core.protocols.store import CheckpointStore


@click.command(
    cls=Verb,
    short_help="Copy checkpoints to another store.",
    examples=(
        f"nxdt checkpoint copy {EXAMPLE_URI} s3://my-bucket/llama-tiny",
        f"nxdt checkpoint copy {EXAMPLE_URI}/step-00000040 /mnt/archive/llama-tiny",
        f"nxdt checkpoint copy {EXAMPLE_URI} /mnt/archive/llama-tiny --steps newest",
        f"nxdt checkpoint copy {EXAMPLE_URI} /mnt/archive/llama-tiny --steps 20,40",
    ),
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--steps", default="all", show_default=True, help="Which committed steps of SRC: all, newest, or numbers: 20,40."
)
@click.option("--deep", is_flag=True, help="Also read the files that are at DST already, and replace damaged ones.")
@trusted_keys
@file_threads
@as_json
def copy(
    source: str, destination: str, steps: str, deep: bool, trusted: tuple[str, ...], threads: int, json_output: bool
) -> None:
    """Copy committed checkpoints from SRC to DST, addresses of any two stores.

    SRC may name one step. Every byte is compared with its digest on its way, and a checkpoint appears at DST once all
    of it is there. After an interruption the same command resumes: complete files are not copied again. With --trusted
    only what one of the keys has signed is copied.
    """
    from nxdt_core.checkpoint import TrustedKeys
    from nxdt_core.cli.checkpoint.copying import copy_checkpoint

    origin, found = look_for_committed(source)
    chosen = _chosen(source, found, steps)
    target = _target(destination, chosen)
    keys = TrustedKeys(trusted) if trusted else None
    reports = []
    with own_for("copy", target) as ownership:
        for status in chosen:
            ownership.check()
            with byte_bar(status.size_bytes, f"step {status.step}") as progress:
                report = copy_checkpoint(
                    origin, target, status.step, threads=threads, deep=deep, progress=progress, trusted=keys
                )
            reports.append(report)
            if not json_output:
                say(_sentence(report, target.uri))
    if json_output:
        print_json([_facts(report, target.uri) for report in reports])


def _chosen(source: str, found: Sequence[CheckpointStatus], steps: str) -> list[CheckpointStatus]:
    """The checkpoints to copy, the newest first: a run resumes from it."""
    from nxdt_core.errors.checkpoints import CheckpointNotFound

    newest_first = sorted(found, key=lambda status: -status.step)
    if steps == "all":
        return newest_first
    if steps == "newest":
        return newest_first[:1]
    try:
        wanted = {int(word) for word in steps.split(",")}
    except ValueError:
        raise click.BadParameter(f"{steps!r} is neither 'all', 'newest' nor numbers like 20,40.") from None
    missing = sorted(wanted - {status.step for status in found})
    if missing:
        there = ", ".join(str(status.step) for status in found)
        reason = f"step {missing[0]} is not committed; the committed steps there are {there}"
        raise CheckpointNotFound(where=source, reason=reason)
    return [status for status in newest_first if status.step in wanted]


def _target(destination: str, chosen: Sequence[CheckpointStatus]) -> CheckpointStore:
    from nxdt_core.checkpoint import locate
    from nxdt_core.errors.checkpoints import CopyOntoOtherStep
    from nxdt_core.kernel import Kernel

    target, step = locate(destination, Kernel.start())
    others = [status.step for status in chosen if status.step != step]
    if step is not None and others:
        raise CopyOntoOtherStep(where=destination, reason=f"it names step {step}, and step {others[0]} is copied")
    return target


def _sentence(report: CopyReport, uri: str) -> str:
    if report.was_committed and not report.files_copied:
        return f"Step {report.step} is already there."
    kept = f", {human_size(report.bytes_kept)} were there already" if report.bytes_kept else ""
    verb = "Repaired" if report.was_committed else "Copied"
    return f"{verb} step {report.step} at {uri}: {human_size(report.bytes_copied)} copied{kept}."


def _facts(report: CopyReport, uri: str) -> dict[str, object]:
    from nxdt_core.checkpoint.format.file_names import step_name

    return {
        "step": report.step,
        "uri": f"{uri}/{step_name(report.step)}",
        "was_committed": report.was_committed,
        "files": report.files,
        "files_copied": report.files_copied,
        "bytes_copied": report.bytes_copied,
        "bytes_kept": report.bytes_kept,
    }
