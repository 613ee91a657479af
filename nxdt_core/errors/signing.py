"""Errors of signed checkpoints: ``checkpoint.sign``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import StorageError

__all__ = [
    "CheckpointDigestsWeak",
    "CheckpointNotSigned",
    "CheckpointNotTrusted",
    "CheckpointSignatureWrong",
    "CheckpointSignedByOther",
    "SigningKeyNotTrusted",
    "SigningKeyUnusable",
    "SigningLibraryMissing",
]


class SigningLibraryMissing(StorageError):
    """Signatures need a library that the core does not require."""

    code = "NXDT-S130"
    happened = "The signature of {where} needs the library cryptography: {reason}."
    remedy = "pip install 'nxdt-core[sign]'."


class SigningKeyUnusable(StorageError):
    """A file of a key that cannot be read, or that holds something other than the Ed25519 key that is needed."""

    code = "NXDT-S131"
    happened = "{where} is not a usable {kind} key: {reason}."
    remedy = (
        "Use Ed25519 keys in PEM without a passphrase: 'openssl genpkey -algorithm ed25519 -out sign.pem' makes a "
        "private key (checkpoint.sign.key), 'openssl pkey -in sign.pem -pubout -out sign.pub.pem' writes its public "
        "key (checkpoint.sign.trusted, --trusted)."
    )
    kind: str


class SigningKeyNotTrusted(StorageError):
    """A run would refuse the checkpoints that it saves itself."""

    code = "NXDT-S132"
    happened = "checkpoint.sign.key ({where}, {reason}) is not one of the keys of checkpoint.sign.trusted."
    remedy = "Add its public key to checkpoint.sign.trusted, so that this run can resume from its own checkpoints."


class CheckpointNotTrusted(StorageError):
    """Base of the errors of checkpoints that lack a valid signature of a trusted key."""

    code = "NXDT-S133"
    happened = "{where} is refused: {reason}."
    remedy = (
        "Take a checkpoint that one of the trusted keys has signed. To accept this one, remove checkpoint.sign.trusted "
        "(or --trusted). A run signs what it saves where checkpoint.sign.key names a private key."
    )


class CheckpointNotSigned(CheckpointNotTrusted):
    """A checkpoint without a signature, where one is required."""

    code = "NXDT-S134"
    happened = "{where} is not signed, and a signature of a trusted key is required: {reason}."


class CheckpointSignedByOther(CheckpointNotTrusted):
    """A checkpoint with the signature of a key that is not trusted."""

    code = "NXDT-S135"
    happened = "{where} is refused: {reason}. Trusted: {known}."
    remedy = (
        "Take a checkpoint that one of the trusted keys has signed. Where that key is to be trusted, get its public "
        "key from its owner, not from this place, and add the file to checkpoint.sign.trusted (or --trusted)."
    )
    trusted: tuple[str, ...]
    """Fingerprints."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "known": listing(self.trusted)}


class CheckpointSignatureWrong(CheckpointNotTrusted):
    """A signature that was not made of this manifest by the key that it names."""

    code = "NXDT-S136"
    happened = "{where} is refused: {reason}."
    remedy = "The manifest or its signature was changed after the save. Restore both from a copy that verifies."


class CheckpointDigestsWeak(CheckpointNotTrusted):
    """A signed manifest whose digests are so weak that anyone can construct other bytes for them."""

    code = "NXDT-S137"
    happened = "{where} is refused although it is signed: {reason}."
