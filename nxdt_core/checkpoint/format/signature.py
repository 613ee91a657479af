"""The signature of a checkpoint: a small file next to its data. Reading it needs no library.

It is an Ed25519 signature of the bytes of ``manifest.json``. The manifest has the SHA-256 digest of each file of
digests, which has that of each block of a data file: so the signature covers every byte that is loaded.

Its place is the directory of the attempt, not that of the manifest: a save that replaces a committed step then has
its own, and the older one stays whole until the manifest is replaced.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from nxdt_core.checkpoint.format.file_names import signature_key
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.errors.checkpoints import CheckpointDamaged
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["Signature", "claimed_signer", "fingerprint_of", "read_signature", "write_signature"]

_ALGORITHM = "ed25519"
_MOST_BYTES = 4096
_DER_PREFIX = bytes.fromhex("302a300506032b6570032100")
"""Of every Ed25519 public key in DER (RFC 8410); the 32 bytes of the key follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What the file holds. Nothing of it was checked."""

    public_key: bytes
    """32 bytes: of the key that is said to have signed."""
    signature: bytes
    """64 bytes."""

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of :attr:`public_key`."""
        return fingerprint_of(self.public_key)

    def encode(self) -> bytes:
        """Return the content of the file."""
        table = {
            "algorithm": _ALGORITHM,
            "public_key": self.public_key.hex(),
            "fingerprint": self.fingerprint,
            "signature": self.signature.hex(),
        }
        return json.dumps(table, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        """Return the inverse of :meth:`encode`.

        Raises:
            ValueError: ``data`` is something else.
        """
        try:
            table = json.loads(data)
            found = cls(public_key=bytes.fromhex(table["public_key"]), signature=bytes.fromhex(table["signature"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError("it is not a signature") from error
        if found.encode() != data or len(found.public_key) != 32 or len(found.signature) != 64:
            raise ValueError("it is not an Ed25519 signature")
        return found


def fingerprint_of(public_key: bytes) -> str:
    """Return the SHA-256 digest of an Ed25519 public key in DER, as ``openssl pkey -pubin -outform DER`` writes it."""
    return f"sha256:{hashlib.sha256(_DER_PREFIX + public_key).hexdigest()}"


def read_signature(storage: CheckpointStore, manifest: Manifest) -> Signature | None:
    """Return the signature of a checkpoint, unchecked; None where it has none.

    Raises:
        CheckpointDamaged: the file is not a signature, or not a regular file.
    """
    key = signature_key(manifest.step, manifest.attempt)
    try:
        with storage.open_read(key) as stream:
            data = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        return Signature.decode(data)
    except ValueError as error:
        raise CheckpointDamaged(where=f"{storage.uri}/{key}", reason=str(error)) from error


def claimed_signer(storage: CheckpointStore, manifest: Manifest) -> str:
    """Return the fingerprint of the key that a signature names, unchecked; empty where none can be read."""
    try:
        signature = read_signature(storage, manifest)
    except CheckpointDamaged:
        return ""
    return "" if signature is None else signature.fingerprint


def write_signature(storage: CheckpointStore, manifest: Manifest, signature: Signature) -> None:
    """Write the signature; before the manifest, so that a committed checkpoint is whole."""
    with storage.open_write(signature_key(manifest.step, manifest.attempt)) as stream:
        stream.write(signature.encode())
