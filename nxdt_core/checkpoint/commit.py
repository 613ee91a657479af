"""The commit of one step: which manifest counts, how it is read, and whose files may be deleted. Torch-free.

A step that was committed before is replaced in one atomic, conditional write of its manifest, so that the older save
counts until the newer one does, and a late writer replaces nothing. A step whose manifest is damaged loses it first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress

from nxdt_core.checkpoint.collective import in_threads
from nxdt_core.checkpoint.format.file_names import (
    MASTER_WEIGHT,
    attempt_prefix,
    manifest_key,
    step_name,
    step_of,
    step_prefix,
)
from nxdt_core.checkpoint.format.manifest import Manifest, decode_manifest, digest, encode_manifest
from nxdt_core.checkpoint.signing import (
    Signature,
    Signer,
    TrustedKeys,
    check_signature,
    read_signature,
    write_signature,
)
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.errors.checkpoints import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointTooNew,
    SameWeightsSaved,
    StorageError,
)
from nxdt_core.protocols.store import CheckpointStore

_THREADS = 8
"""Manifests that are read at the same time; an object store takes tens of milliseconds for each."""


_log = logging.getLogger(__name__)


def read_manifest(storage: CheckpointStore, step: int, *, trusted: TrustedKeys | None = None) -> Manifest:
    """Return the manifest of the committed checkpoint of ``step``. Its files are verified when they are read.

    Args:
        storage: the store that holds the checkpoint.
        step: the step of the checkpoint.
        trusted: keys, one of which must have signed the checkpoint; None requires no signature.

    Raises:
        CheckpointNotTrusted: it lacks a valid signature of one of the keys.
        CheckpointNotFound: nothing is committed under that step.
        CheckpointDamaged: the manifest is not what was written.
        CheckpointTooNew: a later version wrote it.
    """
    manifest, data = _read(storage, step)
    if trusted is not None:
        trusted.check(storage, manifest, data)
    return manifest


def verify_signature(storage: CheckpointStore, step: int, *, trusted: TrustedKeys | None = None) -> Signature | None:
    """Return the signature of the committed checkpoint of ``step``, checked; None where it has none and none is
    required.

    Raises:
        SigningLibraryMissing: it is signed, and the library is not installed. Otherwise as :func:`read_manifest`; a
            wrong signature is an error without ``trusted``, too.
    """
    where = f"{storage.uri}/{step_name(step)}"
    with explained_os_errors(where):
        manifest, data = _read(storage, step)
        if trusted is not None:
            return trusted.check(storage, manifest, data)
        signature = read_signature(storage, manifest)
        if signature is not None:
            check_signature(signature, manifest, data, where=where)
        return signature


def _read(storage: CheckpointStore, step: int) -> tuple[Manifest, bytes]:
    data = read_object(storage, manifest_key(step))
    if data is None:
        where = f"{storage.uri}/{step_name(step)}"
        raise CheckpointNotFound(where=where, reason="it does not exist, or its save was not finished")
    return decode_manifest(data, step=step, where=f"{storage.uri}/{manifest_key(step)}"), data


def read_object(storage: CheckpointStore, key: str) -> bytes | None:
    """Return all bytes of ``key``, or None where there is no such object."""
    try:
        with storage.open_read(key) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def committed_attempt(storage: CheckpointStore, step: int) -> str | None:
    """Return the attempt that a readable manifest of ``step`` names, or None."""
    try:
        return read_manifest(storage, step).attempt
    except (CheckpointNotFound, CheckpointDamaged, CheckpointTooNew):
        return None


def greatest_fencing(storage: CheckpointStore) -> int:
    """Return the greatest number of an ownership that a readable manifest names; 0 where none does."""

    def fencing(step: int) -> int:
        with suppress(CheckpointNotFound, CheckpointDamaged, CheckpointTooNew):
            return read_manifest(storage, step).facts.fencing
        return 0

    objects = ((step_of(info.key.partition("/")[0]), info.key) for info in storage.list("step-"))
    steps = [step for step, key in objects if step is not None and key == manifest_key(step)]
    return max(in_threads(fencing, steps, threads=_THREADS), default=0)


def prepare_step(storage: CheckpointStore, step: int) -> bytes | None:
    """Make ``step`` ready for a new attempt.

    Returns:
        The manifest that the new attempt will replace; None where there is none, or no longer a damaged one.
    """
    key = manifest_key(step)
    data = read_object(storage, key)
    if data is None:
        return None
    try:
        decode_manifest(data, step=step, where=f"{storage.uri}/{key}")
    except CheckpointTooNew:
        return data
    except CheckpointDamaged:
        storage.delete_many([key])
        return None
    return data


def check_weights_moved(before: Manifest | None, manifest: Manifest, *, uri: str) -> None:
    """Refuse to commit the same weights under two steps between which updates were applied.

    Copies that were not renewed look like this (NeMo-RL's issue 3312), and nothing else of a checkpoint shows it.

    Args:
        before: the newest committed checkpoint of the run.
        manifest: about to be committed.
        uri: address of the store, for the message.

    Raises:
        SameWeightsSaved: they are the same.
    """
    if before is None:
        return
    updates, fingerprint = manifest.facts.updates - before.facts.updates, _weights_fingerprint(manifest)
    if updates > 0 and fingerprint and fingerprint == _weights_fingerprint(before):
        reason = (
            f"its weights are bitwise identical to those of {step_name(before.step)}, and {updates} update(s) with "
            f"a learning rate above zero happened between them"
        )
        raise SameWeightsSaved(where=f"{uri}/{step_name(manifest.step)}", reason=reason)


def _weights_fingerprint(manifest: Manifest) -> str:
    """Return a digest over the digests of the files of weights: of the same weights in the same layout it is the same.

    No byte of them is read again. Empty where there is no such file. Where weights were rounded, those that they were
    rounded from count, with what else is in their files: a small update changes no bit of a rounded one.
    """
    rounded = any(key.endswith(f"/{MASTER_WEIGHT}") for key in manifest.tensors.get("optim", {}))
    sections = ("model/", "optim/") if rounded else ("model/",)
    rows = sorted((name, entry.digests_digest) for name, entry in manifest.files.items() if name.startswith(sections))
    return digest(json.dumps(rows).encode()) if rows else ""


def commit(
    storage: CheckpointStore,
    manifest: Manifest,
    replaces: bytes | None,
    *,
    data: bytes | None = None,
    signer: Signer | None = None,
) -> None:
    """Write the manifest: as a new object, or in the place of the manifest ``replaces``.

    ``data`` are the bytes of the manifest where they exist: a copy keeps what a later version put into it. ``signer``
    signs them; the signature is written before the manifest.

    A store may fail after it has done its work (a lost answer, a repeated request): what counts is whose attempt
    is committed in the end.

    Raises:
        CheckpointConflict: another attempt was committed since :func:`prepare_step`, or one by a later owner of the
            store before it.
        StorageError, OSError: the store failed, and this attempt is not committed as far as can be seen.
    """
    key = manifest_key(manifest.step)
    data = data or encode_manifest(manifest)
    later = 0
    if replaces:
        with suppress(CheckpointDamaged, CheckpointTooNew):
            later = decode_manifest(replaces, step=manifest.step, where="").facts.fencing
    if later > manifest.facts.fencing > 0:
        reason = f"the store's owner number {later} did, and this is number {manifest.facts.fencing}"
        raise CheckpointConflict(where=f"{storage.uri}/{key}", reason=reason)
    if signer is not None:
        write_signature(storage, manifest, signer.sign(data))
    failure: Exception | None = None
    try:
        written = storage.put_if_match(key, data, replaces) if replaces else storage.put_if_absent(key, data)
    except (OSError, StorageError) as error:
        failure, written = error, False
    with suppress(OSError, StorageError):
        written = written or committed_attempt(storage, manifest.step) == manifest.attempt
    if written:
        return
    reason = f"the manifest is not that of the attempt {manifest.attempt}"
    raise failure or CheckpointConflict(where=f"{storage.uri}/{key}", reason=reason)


def withdraw(storage: CheckpointStore, step: int, attempt: str) -> None:
    """Delete the files of an attempt that failed, unless it may have been committed. Never raises for the store."""
    try:
        if committed_attempt(storage, step) != attempt:
            storage.delete_many([info.key for info in storage.list(attempt_prefix(step, attempt))])
    except (OSError, StorageError) as error:
        # Usually the failure that stopped the save, which is reported; the next save of the step clears the files.
        _log.info("files of the attempt %s of %s may be left: %s", attempt, storage.uri, error)


def clear_other_attempts(
    storage: CheckpointStore, manifest: Manifest, check_in_time: Callable[[], None] = lambda: None
) -> None:
    """Delete files of the step that are not this attempt's, after the commit. Never raises for the store.

    ``check_in_time`` raises once a later attempt may have begun: what was listed before that is none of its files.
    """
    keep = manifest_key(manifest.step)
    try:
        keys = [info.key for info in storage.list(step_prefix(manifest.step))]
        check_in_time()
        storage.delete_many([key for key in keys if key != keep and not key.startswith(manifest.prefix)])
    except (OSError, StorageError) as error:
        _log.warning("files of older saves are left under %s/%s: %s", storage.uri, keep, error)
