"""What is committed: reading manifests. Torch-free."""

from __future__ import annotations

from contextlib import suppress

from nxdt_core.checkpoint.format.file_names import manifest_key, step_name, step_of
from nxdt_core.checkpoint.format.manifest import Manifest, decode_manifest
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.signing import Signature, TrustedKeys, check_signature, read_signature
from nxdt_core.checkpoint.threads import in_threads
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotFound, CheckpointTooNew
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["committed_attempt", "greatest_fencing", "read_manifest", "read_object", "verify_signature"]

_THREADS = 8
"""Manifests that are read at the same time; an object store takes tens of milliseconds for each."""


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

    found = ((step_of(info.key.partition("/")[0]), info.key) for info in storage.list("step-"))
    steps = [step for step, key in found if step is not None and key == manifest_key(step)]
    return max(in_threads(fencing, steps, threads=_THREADS), default=0)
