"""Errors of signed checkpoints: ``checkpoint.sign``."""

from __future__ import annotations

from nxdt_core.errors.checkpoints import StorageError

SigningLibraryMissing = StorageError.define(
    "NXDT-S130",
    "Signatures need a library that the core does not require.",
    "The signature of {where} needs the library cryptography: {reason}.",
    "pip install 'nxdt-core[sign]'.",
)

SigningKeyUnusable = StorageError.define(
    "NXDT-S131",
    "A file of a key that cannot be read, or that holds something other than the Ed25519 key that is needed.",
    "{where} is not a usable {kind} key: {reason}.",
    "Use Ed25519 keys in PEM without a passphrase: 'openssl genpkey -algorithm ed25519 -out sign.pem' makes a "
    "private key (checkpoint.sign.key), 'openssl pkey -in sign.pem -pubout -out sign.pub.pem' writes its public "
    "key (checkpoint.sign.trusted, --trusted).",
)

SigningKeyNotTrusted = StorageError.define(
    "NXDT-S132",
    "A run would refuse the checkpoints that it saves itself.",
    "checkpoint.sign.key ({where}, {reason}) is not one of the keys of checkpoint.sign.trusted.",
    "Add its public key to checkpoint.sign.trusted, so that this run can resume from its own checkpoints.",
)


class CheckpointNotTrusted(StorageError):
    """Base of the errors of checkpoints that lack a valid signature of a trusted key."""

    code = "NXDT-S133"
    happened = "{where} is refused: {reason}."
    remedy = (
        "Take a checkpoint that one of the trusted keys has signed. To accept this one, remove checkpoint.sign.trusted "
        "(or --trusted). A run signs what it saves where checkpoint.sign.key names a private key."
    )


CheckpointNotSigned = CheckpointNotTrusted.define(
    "NXDT-S134",
    "A checkpoint without a signature, where one is required.",
    "{where} is not signed, and a signature of a trusted key is required: {reason}.",
    "Take a checkpoint that one of the trusted keys has signed. To accept this one, remove checkpoint.sign.trusted "
    "(or --trusted). A run signs what it saves where checkpoint.sign.key names a private key.",
)

CheckpointSignedByOther = CheckpointNotTrusted.define(
    "NXDT-S135",
    "A checkpoint with the signature of a key that is not trusted.",
    "{where} is refused: {reason}. Trusted: {trusted:list}.",
    "Take a checkpoint that one of the trusted keys has signed. Where that key is to be trusted, get its public "
    "key from its owner, not from this place, and add the file to checkpoint.sign.trusted (or --trusted).",
)


class CheckpointSignatureWrong(CheckpointNotTrusted):
    """A signature that was not made of this manifest by the key that it names."""

    code = "NXDT-S136"
    happened = "{where} is refused: {reason}."
    remedy = "The manifest or its signature was changed after the save. Restore both from a copy that verifies."


CheckpointDigestsWeak = CheckpointNotTrusted.define(
    "NXDT-S137",
    "A signed manifest whose digests are so weak that anyone can construct other bytes for them.",
    "{where} is refused although it is signed: {reason}.",
    "Take a checkpoint that one of the trusted keys has signed. To accept this one, remove checkpoint.sign.trusted "
    "(or --trusted). A run signs what it saves where checkpoint.sign.key names a private key.",
)
