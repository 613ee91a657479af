"""``nxdt checkpoint copy``: committed checkpoints from any store to any other, byte for byte. Torch-free.

Every block is compared with its digest during the copy, so that a damaged source ends the copy and never spreads.
Data files are written first and the manifest last, in one atomic write. Until then the destination holds an unfinished
step, and a repeated copy keeps the files that are complete. A file is complete if its size is right and the file of its
digests, which is written after it, is the one that the manifest names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import compress

import click

from nxdt_core.checkpoint.collective import in_threads
from nxdt_core.checkpoint.commit import clear_other_attempts, commit, read_object
from nxdt_core.checkpoint.format.digested_files import VerifiedFile
from nxdt_core.checkpoint.format.file_names import digests_name, manifest_key, step_name, step_prefix
from nxdt_core.checkpoint.format.manifest import Manifest, decode_manifest, digest
from nxdt_core.checkpoint.signing import TrustedKeys, read_signature, write_signature
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.cli.checkpoint.store import (
    EXAMPLE_URI,
    as_named,
    file_threads,
    look_for_committed,
    named_config,
    own_for,
    trusted_keys,
)
from nxdt_core.cli.terminal import byte_bar, human_size
from nxdt_core.cli.verb import as_json, print_json, say, verb
from nxdt_core.errors.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
    CopyHasOtherCheckpoint,
    CopyOntoOtherStep,
)
from nxdt_core.protocols.store import CheckpointStore


@verb(
    f"nxdt checkpoint copy {EXAMPLE_URI} s3://my-bucket/llama-tiny",
    f"nxdt checkpoint copy {EXAMPLE_URI}/step-00000040 /mnt/archive/llama-tiny",
    f"nxdt checkpoint copy {EXAMPLE_URI} /mnt/archive/llama-tiny --steps newest",
    f"nxdt checkpoint copy {EXAMPLE_URI} /mnt/archive/llama-tiny --steps 20,40",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--steps", default="all", show_default=True, help="Which committed steps of SRC: all, newest, or numbers: 20,40."
)
@click.option("--deep", is_flag=True, help="Also read the files that are at DST already, and replace damaged ones.")
@named_config
@trusted_keys
@file_threads
@as_json
def copy(
    source: str,
    destination: str,
    steps: str,
    deep: bool,
    config: str | None,
    trusted: tuple[str, ...],
    threads: int,
    json_output: bool,
) -> None:
    """Copy committed checkpoints from SRC to DST, addresses of any two stores.

    SRC may name one step. Every byte is compared with its digest on its way, and a checkpoint appears at DST once all
    of it is there. After an interruption the same command resumes: complete files are not copied again. With --trusted
    only what one of the keys has signed is copied.
    """
    find, keys = as_named(config, trusted)
    origin, statuses = look_for_committed(source, find)
    chosen = sorted(statuses, key=lambda status: -status.step)  # a run resumes from the newest
    if steps == "newest":
        chosen = chosen[:1]
    elif steps != "all":
        try:
            wanted = {int(word) for word in steps.split(",")}
        except ValueError:
            raise click.BadParameter(f"{steps!r} is neither 'all', 'newest' nor numbers like 20,40.") from None
        missing = sorted(wanted - {status.step for status in statuses})
        if missing:
            committed = ", ".join(str(status.step) for status in statuses)
            reason = f"step {missing[0]} is not committed; the committed steps there are {committed}"
            raise CheckpointNotFound(where=source, reason=reason)
        chosen = [status for status in chosen if status.step in wanted]
    target, step = find(destination)
    others = [status.step for status in chosen if status.step != step]
    if step is not None and others:
        raise CopyOntoOtherStep(where=destination, reason=f"it names step {step}, and step {others[0]} is copied")
    reports = []
    with own_for("copy", target) as ownership:
        for status in chosen:
            ownership.check()
            with byte_bar(status.size_bytes, f"step {status.step}") as progress:
                report = copy_checkpoint(
                    origin, target, status.step, threads=threads, deep=deep, progress=progress, trusted=keys
                )
            reports.append(report)
            if json_output:
                continue
            if report.was_committed and not report.files_copied:
                say(f"Step {report.step} is already there.")
                continue
            there = f", {human_size(report.bytes_kept)} were there already" if report.bytes_kept else ""
            verb_done = "Repaired" if report.was_committed else "Copied"
            say(f"{verb_done} step {report.step} at {target.uri}: {human_size(report.bytes_copied)} copied{there}.")
    if json_output:
        print_json(
            [
                {"step": report.step, "uri": f"{target.uri}/{step_name(report.step)}", **asdict(report)}
                for report in reports
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Result of one :func:`copy_checkpoint`. Bytes are those of data files, without their digests."""

    step: int
    was_committed: bool
    """True if the destination already had this checkpoint; then only the files that it had lost were copied."""
    files: int
    """Data files of the checkpoint."""
    files_copied: int
    bytes_copied: int
    bytes_kept: int
    """Bytes of the files that were already there."""


def copy_checkpoint(
    source: CheckpointStore,
    destination: CheckpointStore,
    step: int,
    *,
    threads: int = 1,
    deep: bool = False,
    progress: Callable[[int], None] = lambda size_bytes: None,
    trusted: TrustedKeys | None = None,
) -> CopyReport:
    """Copy the committed checkpoint of ``step`` with its signature, and commit it under the same step and attempt.

    A failure leaves the destination with an unfinished step, which the next call completes.

    Args:
        source: the store to copy from; nothing in it changes.
        destination: the store to copy to.
        step: the step to copy.
        threads: files that are copied at the same time; each takes a block of memory, and what the stores need.
        deep: read the files that are there already and compare them with their digests, too.
        progress: called from any thread with the number of bytes that are newly known to be there.
        trusted: keys, one of which must have signed the checkpoint; None requires no signature.

    Raises:
        CheckpointNotFound: nothing is committed under ``step`` at the source.
        CheckpointDamaged: a byte at the source is not what was written; the error names the file.
        CheckpointNotTrusted: the source lacks a valid signature of one of the keys; nothing was copied.
        CheckpointTooNew: a later version wrote the manifest, at the source or at the destination.
        CopyHasOtherCheckpoint: another save of the same step is committed at the destination.
        StorageError: one of the stores failed.
    """
    data, manifest = _read_source(source, step)
    with explained_os_errors(f"{source.uri}/{manifest.prefix}"):
        signature = read_signature(source, manifest) if trusted is None else trusted.check(source, manifest, data)
    address = f"{destination.uri}/{step_name(step)}"
    with explained_os_errors(address):
        was_committed = False
        committed = read_object(destination, manifest_key(step))
        if committed is not None:
            try:
                attempt = decode_manifest(committed, step=step, where=f"{destination.uri}/{manifest_key(step)}").attempt
            except CheckpointDamaged:
                destination.delete_many([manifest_key(step)])
            else:
                if attempt != manifest.attempt:
                    reason = f"it was saved as {attempt}, the one to copy as {manifest.attempt}"
                    raise CopyHasOtherCheckpoint(where=address, reason=reason)
                was_committed = True
        sizes = {info.key: info.size_bytes for info in destination.list(manifest.prefix)}
        stop = threading.Event()  # set when another file has failed

        def blocks_of(file: VerifiedFile, key: str) -> Iterator[memoryview]:
            with explained_os_errors(f"{source.uri}/{key}"):
                for block in file.blocks():
                    if stop.is_set():
                        raise _Stopped(key)
                    yield block

        def copy_file(name: str) -> bool:
            """Copy a file unless the destination has it, and return whether it was copied."""
            entry, key = manifest.files[name], manifest.prefix + name
            whole = (sizes.get(key), sizes.get(digests_name(key))) == (entry.size_bytes, entry.digests_bytes)
            if whole and deep:
                try:
                    VerifiedFile(destination, manifest, name).verify()
                except CheckpointDamaged:
                    whole = False
            elif whole:
                digests = read_object(destination, digests_name(key)) or b""
                whole = digest(digests, manifest.digests) == entry.digests_digest
            if whole:
                progress(entry.size_bytes)
                return False
            with explained_os_errors(f"{source.uri}/{key}"):
                file = VerifiedFile(source, manifest, name)
            with explained_os_errors(f"{destination.uri}/{key}"):
                with destination.open_write(key) as stream:
                    for block in blocks_of(file, key):
                        stream.write(block)
                        progress(len(block))
                with destination.open_write(digests_name(key)) as stream:
                    stream.write(file.digests_file)
            return True

        largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)
        try:
            copied = [*compress(largest_first, in_threads(copy_file, largest_first, threads=threads, stop=stop))]
        except CheckpointDamaged:
            if _read_source(source, step)[0] == data:
                raise
            reason = "it was replaced while it was copied"
            raise CheckpointNotFound(where=f"{source.uri}/{step_name(step)}", reason=reason) from None
        if signature is not None:
            with suppress(CheckpointDamaged):  # a damaged one may be replaced
                signature = None if read_signature(destination, manifest) is not None else signature
        if signature is not None:
            write_signature(destination, manifest, signature)
        if not was_committed:
            commit(destination, manifest, None, data=data)
            clear_other_attempts(destination, manifest)
            destination.after_commit(step_prefix(step))
    bytes_copied = sum(manifest.files[name].size_bytes for name in copied)
    return CopyReport(
        step=step,
        was_committed=was_committed,
        files=len(manifest.files),
        files_copied=len(copied),
        bytes_copied=bytes_copied,
        bytes_kept=sum(entry.size_bytes for entry in manifest.files.values()) - bytes_copied,
    )


def _read_source(source: CheckpointStore, step: int) -> tuple[bytes, Manifest]:
    """The manifest, as bytes too: what is written at the destination are these."""
    where = f"{source.uri}/{step_name(step)}"
    with explained_os_errors(where):
        data = read_object(source, manifest_key(step))
    if data is None:
        reason = "it does not exist, its save was not finished, or it was deleted"
        raise CheckpointNotFound(where=where, reason=reason)
    return data, decode_manifest(data, step=step, where=f"{source.uri}/{manifest_key(step)}")


class _Stopped(Exception):
    """Ends the copy of a file after another one failed, so that the store drops what was written; no reader sees it."""
