"""What checkpoint commands share, such as the store that an address means; and list, inspect, verify and prune."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import click
import yaml

from nxdt_core.checkpoint import (
    Manifest,
    Ownership,
    TrustedKeys,
    delete_step,
    list_checkpoints,
    locate,
    owned,
    read_manifest,
)
from nxdt_core.checkpoint.commit import verify_signature
from nxdt_core.checkpoint.format.file_names import step_name, step_prefix
from nxdt_core.checkpoint.read.status import CheckpointStatus, find_problems, newest_first, nothing_at
from nxdt_core.checkpoint.signing import claimed_signer
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.checkpoint.write.retention import plan_prune, with_best
from nxdt_core.cli.terminal import byte_bar, human_size, print_facts, print_table, print_wrapped, shade
from nxdt_core.cli.verb import as_json, attributes, print_json, print_note, say, verb
from nxdt_core.distributed.environment import find_place
from nxdt_core.errors.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointNotTrusted,
    CheckpointSignatureWrong,
    CheckpointTooNew,
    NoSoundCheckpoint,
)
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

if TYPE_CHECKING:
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.train.weights.export import Exported
    from nxdt_core.train.weights.importing import Imported

_T = TypeVar("_T")
_METRICS_SHOWN = 2

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


Locate = Callable[[str], tuple["CheckpointStore", int | None]]


def as_named(config: str | None, trusted: Sequence[str] = ()) -> tuple[Locate, TrustedKeys | None]:
    """Return what finds the store and the step of an address, and the keys of which one must have signed what is read,
    as the options ``--config`` and ``--trusted`` say."""
    if config is None:
        return locate, TrustedKeys(tuple(trusted)) if trusted else None
    from nxdt_core.train import build  # imports torch
    from nxdt_core.train.weights import saved_config

    run, keys = saved_config.named_config(config, trusted)
    assert run is not None
    return partial(build.locate, run), keys


def look_for_committed(uri: str, find: Locate) -> tuple[CheckpointStore, list[CheckpointStatus]]:
    """Return the store that an address names, and its steps but for unfinished ones, or the one step that it names.

    Raises:
        CheckpointNotFound: nothing is left; the error says what is there instead.
    """
    storage, step = with_best(uri, find)
    statuses = list_checkpoints(storage, step)
    finished = [status for status in statuses if status.state != "unfinished"]
    if not finished:
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, statuses))
    return storage, finished


def open_one(uri: str, find: Locate) -> tuple[CheckpointStore, Manifest]:
    """Return the checkpoint that an address ends with, or else the newest committed one there.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointDamaged: its manifest is not what was written.
        CheckpointTooNew: a later version wrote it.
    """
    storage, step = with_best(uri, find)
    newest = next((status.step for status in newest_first(storage, step) if status.state != "unfinished"), None)
    if newest is None:
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, list_checkpoints(storage, step)))
    return storage, read_manifest(storage, newest)


def own_for(command: str, storage: CheckpointStore) -> AbstractContextManager[Ownership]:
    """Keep runs and other commands from writing to ``storage`` for a block.

    Raises:
        StoreInUse: a run or another command writes to it.
    """
    return owned(storage, run=f"nxdt checkpoint {command}", say=lambda line: say(line, err=True))


def print_report(done: Exported | Imported, sentence: str, json_output: bool) -> None:
    """Print what an export or an import did, and its notes."""
    if json_output:
        print_json(asdict(done))
        return
    say(sentence)
    for note in done.notes:
        print_note(note)


def on_all_ranks(work: Callable[[RankAgreement | None], _T], report: Callable[[_T], None]) -> int:
    """Call ``work`` as one of the processes that a launcher has started, or alone; rank 0 reports.

    Returns:
        The exit status. The failure of one rank ends all of them, and is reported once.
    """
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


@verb(f"nxdt checkpoint list {EXAMPLE_URI}", f"nxdt checkpoint list {EXAMPLE_URI} --json", name="list")
@click.argument("uri")
@named_config
@as_json
def list_(uri: str, config: str | None, json_output: bool) -> None:
    """List the checkpoints at URI: committed, unfinished and damaged ones.

    URI may also be the directory of a run, or name one step, or `best`: the one that checkpoint.monitor ranks first.

    Missing files and wrong sizes are seen here; changed bytes are found by `verify --deep`, which reads them all.
    """
    storage, step = with_best(uri, as_named(config)[0])
    statuses = list_checkpoints(storage, step)
    objects, rows = [], []
    for status in statuses:
        facts = status.facts
        archive = storage.archive_state(step_prefix(status.step))  # of the store's copy elsewhere; may take long
        mesh, metrics = (facts.mesh, facts.metrics) if facts else ({}, {})
        objects.append(
            {
                **attributes(status, "step", "state", "uri", "size_bytes"),
                "created": status.created or None,
                "mesh": mesh,
                "metrics": metrics,
                "consumed_samples": facts.consumed_samples if facts else None,
                "consumed_tokens": facts.consumed_tokens if facts else None,
                "problem": status.problem or None,
                "archive": archive or None,
                "signed_by": status.signed_by or None,
            }
        )
        # Of a run that has neither losses nor rewards, what it saved first.
        names = [name for name in metrics if name.endswith(("loss", "reward"))] or list(metrics)
        rows.append(
            (
                str(status.step),
                status.created[:19].replace("T", " "),
                shade(status.state),
                archive,
                human_size(status.size_bytes),
                " ".join(f"{name}{size}" for name, size in mesh.items() if size > 1),
                " ".join(f"{name}={metrics[name]:.4g}" for name in names[:_METRICS_SHOWN]),
                status.problem,
            )
        )
    if json_output:
        print_json(objects)
    elif statuses:
        print_wrapped("checkpoints", storage.uri)
        header = ("STEP", "TIME (UTC)", "STATE", "ARCHIVE", "SIZE", "MESH", "METRICS", "PROBLEM")
        print_table(header, rows, right=("STEP", "SIZE"), optional=("METRICS", "MESH"))
    else:
        say(f"There is no checkpoint at {uri}: {nothing_at(storage, statuses)}.", err=True)


@verb(
    f"nxdt checkpoint inspect {EXAMPLE_URI}",
    f"nxdt checkpoint inspect {EXAMPLE_URI}/step-00000040 --tensors",
    f"nxdt checkpoint inspect {EXAMPLE_URI} --saved-config > again.yaml",
    f"nxdt checkpoint inspect {EXAMPLE_URI} --json",
)
@click.argument("uri")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--saved-config", is_flag=True, help="Print the saved configuration, as YAML or JSON.")
@named_config
@as_json
def inspect(uri: str, tensors: bool, saved_config: bool, config: str | None, json_output: bool) -> None:
    """Show what is in a checkpoint, from its manifest alone: the newest one at URI, or the step that URI names. URI may
    end in `best`, the step that checkpoint.monitor ranks first.
    """
    storage, manifest = open_one(uri, as_named(config)[0])
    facts, address = manifest.facts, f"{storage.uri}/{step_name(manifest.step)}"
    if saved_config:
        saved = dict(facts.config)
        text = yaml.safe_dump(saved, sort_keys=False, allow_unicode=True)
        print_json(saved) if json_output else say(text, end="")
        return
    signer = claimed_signer(storage, manifest)
    sections: dict[str, dict[str, Any]] = {}
    for section, index in manifest.tensors.items():
        sections[section] = {
            "tensors": len(index),
            # Tensors that share the memory of another one count as tensors and have no bytes.
            "elements": sum(prod(entry.shape) for entry in index.values() if entry.same_as is None),
            "size_bytes": sum(entry.part_bytes(part) for entry in index.values() for part in entry.parts),
            "dtypes": dict(Counter(entry.dtype for entry in index.values())),
        }
    entries = [
        (section, name, entry, sum(map(entry.part_bytes, entry.parts)))
        for section, index in manifest.tensors.items()
        for name, entry in index.items()
    ]
    if json_output:
        taken = ("consumed_samples", "consumed_tokens", "mesh", "metrics", "versions", "plugin_fingerprint")
        print_json(
            {
                "step": manifest.step,
                "uri": address,
                **attributes(manifest, "attempt", "created", "size_bytes"),
                "files": len(manifest.files),
                **attributes(facts, *taken),
                "sections": sections,
                "tensors": [
                    {
                        "section": section,
                        "name": name,
                        **attributes(entry, "dtype", "shape"),
                        "size_bytes": size_bytes,
                        "parts": len(entry.parts),
                        "same_as": entry.same_as,
                    }
                    for section, name, entry, size_bytes in entries
                ],
                "signed_by": signer or None,
            }
        )
        return
    print_facts(
        [
            ("checkpoint", address),
            ("step", f"{manifest.step:,}"),
            ("saved", f"{manifest.created}, as {manifest.attempt}"),
            ("consumed", f"{facts.consumed_samples:,} samples, {facts.consumed_tokens:,} tokens"),
            ("size", f"{human_size(manifest.size_bytes)} in {len(manifest.files)} files"),
            ("mesh", _pairs(facts.mesh)),
            ("metrics", _pairs(facts.metrics)),
            ("versions", _pairs(facts.versions)),
            ("plugins", facts.plugin_fingerprint or "-"),
            ("signed by", f"{signer} (checked by 'verify')" if signer else "-"),
        ]
    )
    click.echo()
    rows: list[tuple[str, ...]] = []
    for section, of in sections.items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in of["dtypes"].items())
        rows.append((section, f"{of['tensors']:,}", f"{of['elements']:,}", human_size(of["size_bytes"]), dtypes))
    print_table(("SECTION", "TENSORS", "ELEMENTS", "SIZE", "DTYPES"), rows, right=("TENSORS", "ELEMENTS", "SIZE"))
    if tensors:
        click.echo()
        rows = [
            (
                section,
                entry.dtype,
                " x ".join(map(str, entry.shape)) or "scalar",
                human_size(size_bytes),
                str(len(entry.parts)),
                f"{name}, the memory of {entry.same_as}" if entry.same_as else name,
            )
            for section, name, entry, size_bytes in entries
        ]
        header = ("SECTION", "DTYPE", "SHAPE", "SIZE", "PARTS", "NAME")
        print_table(header, rows, right=("SIZE", "PARTS"), optional=("PARTS", "SECTION", "SIZE"))


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "-"


@verb(
    f"nxdt checkpoint verify {EXAMPLE_URI}",
    f"nxdt checkpoint verify {EXAMPLE_URI}/step-00000040 --deep",
    f"nxdt checkpoint verify {EXAMPLE_URI} --deep --trusted sign.pub.pem",
)
@click.argument("uri")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@named_config
@trusted_keys
@file_threads
@as_json
@click.pass_context
def verify(
    ctx: click.Context,
    uri: str,
    deep: bool,
    config: str | None,
    trusted: tuple[str, ...],
    threads: int,
    json_output: bool,
) -> None:
    """Check the committed checkpoints at URI: manifests, signatures, files, their sizes and the files of their digests.

    With --deep every byte is read and compared with its digest: nothing else finds a changed one. A wrong
    signature is damage. Without --trusted, unsigned checkpoints and signatures of any key are accepted. URI may name
    one step. A step that a run deletes meanwhile is left out. Exit status 1 where anything is damaged or not trusted.
    """
    find, keys = as_named(config, trusted)
    storage, statuses = look_for_committed(uri, find)
    verdicts: list[dict[str, Any]] = []
    rows = []
    for status in statuses:
        try:
            state, problems, signer = _verify_step(storage, status, deep, threads, keys)
        except CheckpointNotFound:
            if status is statuses[-1] and not verdicts:
                raise
            continue
        verdicts.append({"step": status.step, "problems": problems, "signed_by": signer or None})
        rows.append((str(status.step), shade(state), signer and f"signed by {signer}", "\n".join(problems)))
    if json_output:
        print_json(verdicts)
    else:
        print_table(("STEP", "STATE", "SIGNATURE", "PROBLEMS"), rows, right=("STEP",))
    ctx.exit(1 if any(verdict["problems"] for verdict in verdicts) else 0)


def _verify_step(
    storage: CheckpointStore, status: CheckpointStatus, deep: bool, threads: int, trusted: TrustedKeys | None
) -> tuple[str, list[str], str]:
    """Return the state of one step, its problems, and the fingerprint of the key whose signature is right."""
    if status.is_link:
        return "damaged", [status.problem], ""
    with byte_bar(status.size_bytes if deep else 0, f"step {status.step}") as progress:
        problems = find_problems(
            storage, status.step, "bytes" if deep else "digests", threads=threads, progress=progress
        )
    too_new = status.state == "committed" and status.problem
    state, signer = "too new" if too_new else "damaged" if problems else "ok", ""
    try:
        signature = verify_signature(storage, status.step, trusted=trusted)
        signer = "" if signature is None else signature.fingerprint
    except (CheckpointDamaged, CheckpointNotTrusted, CheckpointTooNew) as error:
        changed = not isinstance(error, CheckpointNotTrusted) or isinstance(error, CheckpointSignatureWrong)
        if state == "ok":
            state = "damaged" if changed else "not trusted"
        problem = f"{error.where}: {error.reason}"
        problems += [] if problem in problems else [problem]
    return state, problems, signer


@verb(
    f"nxdt checkpoint prune {EXAMPLE_URI} --keep-last 3 --dry-run", f"nxdt checkpoint prune {EXAMPLE_URI} --keep-last 3"
)
@click.argument("uri")
@click.option("--keep-last", required=True, type=click.IntRange(min=1), help="Newest committed checkpoints to keep.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask on a terminal.")
@named_config
@as_json
def prune(uri: str, keep_last: int, dry_run: bool, yes: bool, config: str | None, json_output: bool) -> None:
    """Delete all steps at URI that are older than the newest ones that are kept.

    Every byte of one of those kept is read first: while none of them is sound, nothing is deleted. Unfinished and
    damaged steps do not count, and go when they are older; those that a run saved for good (permanent) stay. On a
    terminal it asks. While a run saves to URI, it refuses.
    """
    storage, step = with_best(uri, as_named(config)[0])
    if step is not None:
        raise click.BadParameter(f"{uri!r} names one step; name the address of all of them.", param_hint="'URI'")
    if not list_checkpoints(storage):
        raise CheckpointNotFound(where=uri, reason=nothing_at(storage, []))
    plan = plan_prune(storage, keep_last)
    if plan.keep and not plan.sound:
        steps_to_keep = ", ".join(map(str, plan.keep))
        raise NoSoundCheckpoint(where=uri, reason=f"no checkpoint there is sound among the steps {steps_to_keep}")
    if not json_output:
        for what, steps in (("Keeps", plan.keep), ("Would delete" if dry_run else "Deletes", plan.delete)):
            noun = "nothing" if not steps else "step " if len(steps) == 1 else "steps "
            click.echo(f"{what} {noun}{', '.join(map(str, steps))}.")
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
