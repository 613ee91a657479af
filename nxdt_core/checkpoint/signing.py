"""Signatures: signing the manifest of a save, and refusing checkpoints without that of a trusted key. Torch-free.

A signature is a small file next to the data, an Ed25519 signature of the bytes of ``manifest.json``. The manifest has
the SHA-256 digest of each file of digests, which has that of each block of a data file: so the signature covers every
byte that is loaded. Its place is the directory of the attempt, not that of the manifest: a save that replaces a
committed step then has its own, and the older one stays whole until the manifest is replaced.

The library is imported when a key is first read: the core works without it, and reads signatures without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nxdt_core.checkpoint.format.file_names import signature_key, step_name
from nxdt_core.checkpoint.format.manifest import STRONG, Manifest
from nxdt_core.errors.checkpoints import (
    CheckpointDamaged,
    CheckpointDigestsWeak,
    CheckpointNotSigned,
    CheckpointSignatureWrong,
    CheckpointSignedByOther,
    SigningKeyNotTrusted,
    SigningKeyUnusable,
    SigningLibraryMissing,
)
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.paths import expand_home

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MOST_KEY_BYTES = 2**16
_ALGORITHM = "ed25519"
_MOST_BYTES = 4096
_DER_PREFIX = bytes.fromhex("302a300506032b6570032100")
"""Prefix of every Ed25519 public key in DER (RFC 8410); the 32 bytes of the key follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Content of a signature file. Nothing of it was checked."""

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
            decoded = cls(public_key=bytes.fromhex(table["public_key"]), signature=bytes.fromhex(table["signature"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError("it is not a signature") from error
        if decoded.encode() != data or len(decoded.public_key) != 32 or len(decoded.signature) != 64:
            raise ValueError("it is not an Ed25519 signature")
        return decoded


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


class Signer:
    """Signs manifests with one private key.

    Args:
        path: PEM file of an Ed25519 private key. It is read when it is first needed, which is on the first rank only.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = expand_home(path)

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        key: Ed25519PrivateKey = _read_key(self._path, "private")
        return key

    @cached_property
    def public_key(self) -> bytes:
        """The 32 bytes of the public key.

        Raises:
            SigningLibraryMissing: the library is not installed.
            SigningKeyUnusable: the file does not hold such a key.
        """
        return self._key.public_key().public_bytes_raw()

    def sign(self, manifest: bytes) -> Signature:
        """Return the signature of the bytes of a manifest. Raises as :attr:`public_key`."""
        return Signature(public_key=self.public_key, signature=self._key.sign(manifest))

    def check(self, trusted: TrustedKeys | None) -> None:
        """Check, before a run starts, that the key can be read and that the run would trust what it saves.

        Raises:
            SigningKeyNotTrusted: ``trusted`` lacks it. Otherwise as :attr:`public_key`.
        """
        fingerprint = fingerprint_of(self.public_key)
        if trusted is not None and fingerprint not in trusted.fingerprints:
            raise SigningKeyNotTrusted(where=str(self._path), reason=fingerprint)


class TrustedKeys:
    """Public keys whose signatures are accepted.

    Args:
        paths: PEM files of Ed25519 public keys, read when they are first needed.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [expand_home(path) for path in paths]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprint of each key.

        Raises:
            SigningLibraryMissing: the library is not installed.
            SigningKeyUnusable: a file does not hold such a key.
        """
        return tuple(fingerprint_of(_read_key(path, "public").public_bytes_raw()) for path in self._paths)

    def check(self, storage: CheckpointStore, manifest: Manifest, data: bytes) -> Signature:
        """Return the signature of a checkpoint that one of the keys has signed, and refuse any other.

        Args:
            storage: the store that holds the checkpoint.
            manifest: the manifest of the checkpoint.
            data: the bytes that ``manifest`` was decoded from.

        Raises:
            CheckpointNotTrusted: a subclass that says why.
            CheckpointDamaged: the signature file does not hold a signature.
        """
        trusted, where = self.fingerprints, f"{storage.uri}/{step_name(manifest.step)}"
        signature = read_signature(storage, manifest)
        if signature is None:
            raise CheckpointNotSigned(where=where, reason="it has no signature")
        if signature.fingerprint not in trusted:
            reason = f"it is signed by {signature.fingerprint}, which is not a trusted key"
            raise CheckpointSignedByOther(where=where, reason=reason, trusted=trusted)
        check_signature(signature, manifest, data, where=where)
        return signature


def refuse_foreign(trusted: TrustedKeys | None, path: str | Path) -> None:
    """Refuse weights of another program where a signature is required.

    Raises:
        CheckpointNotSigned: ``trusted`` is not None.
    """
    if trusted is not None:
        reason = "it is a checkpoint of another program, and only those of nxdt carry signatures"
        raise CheckpointNotSigned(where=str(path), reason=reason)


def check_signature(signature: Signature, manifest: Manifest, data: bytes, *, where: str) -> None:
    """Check that the named key has signed the manifest, and that this covers the files.

    Args:
        signature: the signature that the store has for it.
        manifest: the committed manifest of the checkpoint.
        data: the bytes that ``manifest`` was decoded from.
        where: address of the checkpoint, for messages.

    Raises:
        CheckpointSignatureWrong: the key did not sign these bytes.
        CheckpointDigestsWeak: other bytes can have the digests in the manifest.
        SigningLibraryMissing: the library is not installed.
    """
    with _library(where):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(signature.public_key).verify(signature.signature, data)
    except (InvalidSignature, ValueError) as error:
        reason = f"its signature is wrong: the key {signature.fingerprint} did not sign this manifest"
        raise CheckpointSignatureWrong(where=where, reason=reason) from error
    if manifest.digests != STRONG:
        reason = f"other bytes can have the {manifest.digests} digests of its files; {STRONG} is required"
        raise CheckpointDigestsWeak(where=where, reason=reason)


def _read_key(path: Path, kind: Literal["private", "public"]) -> Any:
    with _library(str(path)):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    cause: Exception | None = None
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_KEY_BYTES)
        key = load_pem_public_key(data) if kind == "public" else load_pem_private_key(data, password=None)
        if isinstance(key, Ed25519PublicKey if kind == "public" else Ed25519PrivateKey):
            return key
        reason = f"it is a {type(key).__name__}, not an Ed25519 key"
    except OSError as error:
        reason, cause = error.strerror or str(error), error
    except TypeError as error:
        reason, cause = "it is encrypted with a passphrase", error
    except Exception as error:  # the library raises ValueError and its own errors
        reason, cause = f"it does not hold a {kind} key in PEM", error
    raise SigningKeyUnusable(where=str(path), kind=kind, reason=reason) from cause


@contextmanager
def _library(where: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise SigningLibraryMissing(where=where, reason=str(error)) from error
