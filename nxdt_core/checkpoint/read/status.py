"""The content of a store, and whether it is sound. Torch-free.

Cheap: names, sizes and manifests (one listing and one small read a step). Deep: every byte against its digest.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from nxdt_core.checkpoint.collective import in_threads, on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.commit import read_manifest
from nxdt_core.checkpoint.foreign import recognise
from nxdt_core.checkpoint.format.digested_files import VerifiedFile, check_header, read_whole, tensors_by_file
from nxdt_core.checkpoint.format.file_names import (
    digests_name,
    is_state_name,
    manifest_key,
    signature_key,
    step_name,
    step_of,
    step_prefix,
)
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, Manifest, decode_rank_state, state_tensors
from nxdt_core.checkpoint.signing import TrustedKeys, claimed_signer
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.config.tree import parse_yaml
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotFound, CheckpointTooNew
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.paths import scheme_of
from nxdt_core.system.regular_files import read_text

State = Literal["committed", "unfinished", "damaged"]

_THREADS = 4
"""Files that a rank reads at the same time when it looks for the newest sound checkpoint."""


Depth = Literal["sizes", "digests", "bytes"]
"""Depth of a check. ``sizes``: the manifest, and names and sizes of all files. ``digests``: also the files of digests.
``bytes``: also every byte of every file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """One step of a store."""

    step: int
    state: State
    """``unfinished``: it has no manifest. ``damaged``: its manifest is not valid, or files are missing or have another
    size; only :func:`verify` detects changed bytes in files."""
    uri: str
    """Address of the step."""
    size_bytes: int
    """Size of everything below the step's directory, leftovers of other attempts included."""
    problem: str = ""
    """Defect of the step, with the file's name; empty where there is none."""
    is_link: bool = False
    """A symbolic link or a file is in the place of the step's directory. It counts as damaged, and
    :func:`nxdt_core.checkpoint.prune` does not delete it: the data is stored elsewhere."""
    created: str = ""
    """Time of the save in UTC, ISO 8601; empty where no manifest can be read."""
    facts: CheckpointFacts | None = None
    """Facts that the run recorded about itself, where a manifest can be read."""
    signed_by: str = ""
    """Fingerprint of the key that its signature names, unchecked; empty where there is none that can be read."""


def list_checkpoints(storage: CheckpointStore, step: int | None = None) -> list[CheckpointStatus]:
    """Return all steps that have a file in ``storage``, ascending, or ``step`` alone; an address that does not exist
    has none."""
    return [*newest_first(storage, step)][::-1]


def newest_first(
    storage: CheckpointStore, step: int | None = None, *, names_only: bool = False
) -> Iterator[CheckpointStatus]:
    """Yield what :func:`list_checkpoints` returns, descending, after one listing of the store.

    The manifest of a step is read when the step is yielded. With ``names_only`` none is read: every step that has a
    manifest counts as ``committed``, and its facts are unknown.
    """
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    with explained_os_errors(storage.uri):
        for info in storage.list("step-" if step is None else step_name(step)):
            number = step_of(info.key.partition("/")[0])
            if number is not None and step in (None, number):
                sizes[number][info.key] = info.size_bytes
        for number in sorted(sizes, reverse=True):
            yield _status(storage, number, sizes.pop(number), names_only=names_only)


def verify(storage: CheckpointStore, step: int, *, deep: bool = True) -> list[str]:
    """Return all problems of the checkpoint of ``step``, each a sentence that names the file; empty if it is intact.

    Args:
        storage: the store that holds the checkpoint.
        step: the step of the checkpoint.
        deep: read every file and compare every block with its digest, instead of names and sizes only.
    """
    try:
        return find_problems(storage, step, "bytes" if deep else "sizes")
    except CheckpointNotFound as error:
        return [f"{error.where}: {error.reason}"]


def find_problems(
    storage: CheckpointStore,
    step: int,
    depth: Depth,
    *,
    threads: int = 1,
    progress: Callable[[int], None] = lambda size_bytes: None,
    share: tuple[int, int] = (0, 1),
) -> list[str]:
    """Return the problems that :func:`verify` finds, to a chosen depth.

    Args:
        storage: the store that holds the checkpoint.
        step: the step of the checkpoint.
        depth: how thoroughly to check.
        threads: number of files that are read in parallel; each needs a block of memory.
        progress: called from any thread with the number of bytes that were just compared.
        share: (k, n) opens only every n-th file from the k-th on, by size.

    Raises:
        CheckpointNotFound: it has no manifest, or a run deleted it meanwhile, whose deletions begin with the manifest.
    """
    where = f"{storage.uri}/{step_name(step)}"
    with explained_os_errors(where):
        try:
            manifest = read_manifest(storage, step)
        except (CheckpointDamaged, CheckpointTooNew) as error:
            return [f"{error.where}: {error.reason}"]
        problems: list[str] = []
        if depth != "bytes":
            sizes = {info.key: info.size_bytes for info in storage.list(step_prefix(step))}
            problems = _wrong_sizes(storage, manifest, sizes)

        stop = threading.Event()
        stored = tensors_by_file(manifest, manifest.files)

        def problem_of(name: str) -> str | None:
            try:
                file = VerifiedFile(storage, manifest, name)
                if depth == "bytes":
                    for block in file.blocks():
                        if stop.is_set():
                            break
                        progress(len(block))
                    if not stop.is_set():
                        # What loading relies on in a file with correct bytes.
                        if name in stored:
                            check_header(file, stored[name])
                        if is_state_name(name):
                            tensors = dict.fromkeys(state_tensors(manifest, name))
                            data, at = read_whole(storage, manifest, name), f"{storage.uri}/{manifest.prefix}{name}"
                            decode_rank_state(data, tensors, manifest, where=at)
            except CheckpointDamaged as error:
                return f"{error.where}: {error.reason}"
            return None

        if not problems and depth != "sizes":
            largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)
            results = in_threads(problem_of, largest_first[share[0] :: share[1]], threads=threads, stop=stop)
            problems = [problem for problem in results if problem is not None]
        if problems and storage.stat(manifest_key(step)) is None:
            raise CheckpointNotFound(where=where, reason="it was deleted while it was read")
        return problems


def latest(
    storage: CheckpointStore,
    *,
    warn: Callable[[str], None],
    ranks: RankAgreement | None = None,
    trusted: TrustedKeys | None = None,
) -> Manifest | None:
    """Return the newest committed checkpoint whose every byte verifies, or None.

    Unfinished saves, and steps that another run deletes meanwhile, are skipped silently; each damaged checkpoint is
    reported to ``warn`` in a line that names the file.

    Args:
        storage: the store to search.
        warn: called on rank 0 with each message.
        ranks: ranks that share the reading and all get the same answer; None for a single process.
        trusted: keys, one of which must have signed the checkpoint; None requires no signature.

    Raises:
        CheckpointNotTrusted: the newest sound one lacks a valid signature of one of the keys. (No older
            one is taken: any user who can write to the store could make a run lose its newer steps.)
        CheckpointTooNew: the newest sound one was written by a later version. (Resuming from an older one would
            throw its steps away.)
    """
    statuses, share = newest_first(storage), (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    while (status := on_first_rank(ranks, lambda: next(statuses, None), where=storage.uri)) is not None:
        if status.state == "unfinished":
            continue
        problems = [status.problem]
        if status.state == "committed":
            step, where = status.step, status.uri
            read = partial(read_manifest, storage, step, trusted=trusted)
            find = partial(find_problems, storage, step, "bytes", threads=_THREADS, share=share)
            try:
                with explained_os_errors(where):
                    manifest = on_first_rank(ranks, read, where=where)
                problems = [*chain.from_iterable(on_all_ranks(ranks, find, where=where))]
            except CheckpointNotFound:
                continue
            if not problems:
                return manifest
        if rank_of(ranks) == 0:
            warn(f"Checkpoint {step_name(status.step)} is damaged and skipped: {problems[0]}")
    return None


def find_checkpoint(
    storage: CheckpointStore,
    step: int | None,
    *,
    warn: Callable[[str], None],
    ranks: RankAgreement | None = None,
    trusted: TrustedKeys | None = None,
) -> Manifest:
    """Return the checkpoint of ``step``, or the newest sound one where ``step`` is None (see :func:`latest`).

    Raises:
        CheckpointNotTrusted: it lacks a valid signature of one of the keys ``trusted``.
        CheckpointNotFound: there is none.
        CheckpointDamaged: ``step`` was named and its manifest is not what was written.
    """
    if step is not None:
        where = f"{storage.uri}/{step_name(step)}"
        with explained_os_errors(where):
            return on_first_rank(ranks, lambda: read_manifest(storage, step, trusted=trusted), where=where)
    manifest = latest(storage, warn=warn, ranks=ranks, trusted=trusted)
    if manifest is None:
        raise CheckpointNotFound(where=storage.uri, reason=nothing_at(storage, list_checkpoints(storage)))
    return manifest


def nothing_at(storage: CheckpointStore, statuses: Sequence[CheckpointStatus]) -> str:
    """Return why ``storage`` has nothing that can be used, where the steps of ``statuses`` are all unfinished or
    damaged."""
    if any(status.state != "unfinished" for status in statuses):
        return "no step there is committed and sound"
    if statuses:
        return f"the save of {', '.join(f'step {status.step}' for status in statuses[-3:])} was not finished"
    others = [str(status.step) for status in list_checkpoints(storage) if status.state == "committed"]
    if others:
        return f"the committed steps there are {', '.join(others)}"
    path = Path(storage.uri)
    format = recognise(path, Kernel.start())
    if format is not None:
        return f"it is {format.record.summary}, which 'nxdt checkpoint import {path} DST' reads"
    with suppress(OSError, UnicodeDecodeError):
        written, _ = parse_yaml(read_text(path / "config.yaml"), "config.yaml")
        if isinstance(uri := written.get("checkpoint.uri"), str):
            return f"it is the directory of a run, whose checkpoints are at {uri}"
    below = path / "checkpoints"
    if below.is_dir():
        return f"it is the directory of a run, whose checkpoints are in {below}"
    if runs := sorted(below.parent.name for below in path.glob("*/checkpoints")):
        return f"it is a directory of runs; name one of {listing(runs)}"
    if scheme_of(storage.uri) != "file" or path.exists():
        return "no run has saved anything there"
    owner = path.parent
    if owner.parent == Path.cwd() and not owner.exists() and re.fullmatch("[A-Za-z0-9-]+", owner.name):
        return f"it does not exist; a model of the Hugging Face hub is hf:{owner.name}/{path.name}"
    return "it does not exist"


def _status(
    storage: CheckpointStore, step: int, sizes: Mapping[str, int], *, names_only: bool = False
) -> CheckpointStatus:
    name = step_name(step)
    state: State = "committed"
    problem, manifest = "", None
    unreadable = _unreadable(storage, name) if name in sizes else ""
    if unreadable:
        state, problem = "damaged", f"{storage.uri}/{name}: {unreadable}"
    elif manifest_key(step) not in sizes:
        state = "unfinished"
    elif not names_only:
        try:
            manifest = read_manifest(storage, step)
        except CheckpointNotFound:  # deleted since it was listed
            state = "unfinished"
        except CheckpointTooNew as error:
            problem = f"{error.where}: {error.reason}"
        except CheckpointDamaged as error:
            state, problem = "damaged", f"{error.where}: {error.reason}"
        else:
            problem = next(iter(_wrong_sizes(storage, manifest, sizes)), "")
            state = "damaged" if problem else "committed"
    signed = manifest is not None and signature_key(step, manifest.attempt) in sizes  # else without a read
    return CheckpointStatus(
        step=step,
        state=state,
        uri=f"{storage.uri}/{name}",
        size_bytes=sum(sizes.values()),
        problem=problem,
        is_link=name in sizes,
        created=manifest.created if manifest else "",
        facts=manifest.facts if manifest else None,
        signed_by=claimed_signer(storage, manifest) if manifest and signed else "",
    )


def _wrong_sizes(storage: CheckpointStore, manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    problems = []
    for name, entry in manifest.files.items():
        for file, size in ((name, entry.size_bytes), (digests_name(name), entry.digests_bytes)):
            key = manifest.prefix + file
            actual = sizes.get(key)
            if actual != size:
                unreadable = "" if actual else _unreadable(storage, key)
                reason = unreadable or f"it has {actual} bytes instead of {size}"
                problems.append(f"{storage.uri}/{key}: {reason}")
    return problems


def _unreadable(storage: CheckpointStore, key: str) -> str:
    """Why ``key`` cannot be read; empty where it can."""
    try:
        return "it is missing" if storage.stat(key) is None else ""
    except CheckpointDamaged as error:
        return error.reason
