"""``nxdt checkpoint verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.checkpoint.store import EXAMPLE_URI, file_threads, look_for_committed, trusted_keys
from nxdt_core.cli.terminal import byte_bar, print_table, shade
from nxdt_core.cli.verb import Verb, as_json, print_json

if TYPE_CHECKING:
    from nxdt_core.checkpoint import CheckpointStatus, TrustedKeys
    from nxdt_core.checkpoint.read.status import Depth
    from nxdt_core.protocols.store import CheckpointStore


@click.command(
    cls=Verb,
    examples=(
        f"nxdt checkpoint verify {EXAMPLE_URI}",
        f"nxdt checkpoint verify {EXAMPLE_URI}/step-00000040 --deep",
        f"nxdt checkpoint verify {EXAMPLE_URI} --deep --trusted sign.pub.pem",
    ),
)
@click.argument("uri")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@trusted_keys
@file_threads
@as_json
@click.pass_context
def verify(ctx: click.Context, uri: str, deep: bool, trusted: tuple[str, ...], threads: int, json_output: bool) -> None:
    """Check the committed checkpoints at URI: manifests, signatures, files, their sizes and the files of their digests.

    With --deep every byte is read and compared with its digest: nothing else finds a changed one. A wrong
    signature is damage. Without --trusted, unsigned checkpoints and signatures of any key are accepted. URI may name
    one step. A step that a run deletes meanwhile is left out. Exit status 1 where anything is damaged or not trusted.
    """
    from nxdt_core.checkpoint import TrustedKeys
    from nxdt_core.errors.checkpoints import CheckpointNotFound

    storage, found = look_for_committed(uri)
    keys, verdicts = TrustedKeys(trusted) if trusted else None, list[_Verdict]()
    for status in found:
        try:
            verdicts.append(_verdict(storage, status, "bytes" if deep else "digests", threads, keys))
        except CheckpointNotFound:
            if status is found[-1] and not verdicts:
                raise
    if json_output:
        print_json(
            [
                {"step": each.step, "problems": list(each.problems), "signed_by": each.signed_by or None}
                for each in verdicts
            ]
        )
    else:
        rows = [
            (
                str(each.step),
                shade(each.state),
                f"signed by {each.signed_by}" if each.signed_by else "",
                "\n".join(each.problems),
            )
            for each in verdicts
        ]
        print_table(("STEP", "STATE", "SIGNATURE", "PROBLEMS"), rows, right=("STEP",))
    ctx.exit(1 if any(each.problems for each in verdicts) else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Result of the verification of one step."""

    step: int
    state: str
    problems: tuple[str, ...]
    signed_by: str
    """Fingerprint of the key whose signature is right."""


def _verdict(
    storage: CheckpointStore, status: CheckpointStatus, depth: Depth, threads: int, trusted: TrustedKeys | None
) -> _Verdict:
    from nxdt_core.checkpoint.commit import verify_signature
    from nxdt_core.checkpoint.read.status import find_problems
    from nxdt_core.errors.checkpoints import (
        CheckpointDamaged,
        CheckpointNotTrusted,
        CheckpointSignatureWrong,
        CheckpointTooNew,
    )

    if status.is_link:
        return _Verdict(step=status.step, state="damaged", problems=(status.problem,), signed_by="")
    with byte_bar(status.size_bytes if depth == "bytes" else 0, f"step {status.step}") as progress:
        problems = find_problems(storage, status.step, depth, threads=threads, progress=progress)
    too_new = status.state == "committed" and status.problem
    state, signed_by = "too new" if too_new else "damaged" if problems else "ok", ""
    try:
        signature = verify_signature(storage, status.step, trusted=trusted)
        signed_by = "" if signature is None else signature.fingerprint
    except (CheckpointDamaged, CheckpointNotTrusted, CheckpointTooNew) as error:
        changed = not isinstance(error, CheckpointNotTrusted) or isinstance(error, CheckpointSignatureWrong)
        if state == "ok":
            state = "damaged" if changed else "not trusted"
        problem = f"{error.where}: {error.reason}"
        problems += [] if problem in problems else [problem]
    return _Verdict(step=status.step, state=state, problems=tuple(problems), signed_by=signed_by)
