"""What the tests of signatures share: keys, and every way in which a signed checkpoint is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from nxdt_core.checkpoint import (
    Signer,
    TrustedKeys,
    find_checkpoint,
    load_model,
    load_optimizer,
    load_state,
    saved_ranks,
)
from nxdt_core.checkpoint.format.digested_files import VerifiedFile
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["load_trusted", "make_key", "write_key"]


def write_key(path: Path, key: Any) -> tuple[Path, Path]:
    """Write ``path`` and ``path.pub`` in PEM."""
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = path.with_suffix(".pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path, public


def make_key(directory: Path, name: str) -> tuple[Signer, TrustedKeys]:
    private, public = write_key(directory / f"{name}.pem", Ed25519PrivateKey.generate())
    return Signer(private), TrustedKeys([public])


def load_trusted(storage: CheckpointStore, trusted: TrustedKeys, step: int = 1) -> None:
    """Load everything of a checkpoint, as a run that trusts only these keys does, and every other file of it."""
    manifest = find_checkpoint(storage, step, warn=print, trusted=trusted)
    load_model(storage, manifest)
    load_optimizer(storage, manifest)
    for rank in range(saved_ranks(manifest)):
        load_state(storage, manifest, rank=rank)
    for name in manifest.files:
        VerifiedFile(storage, manifest, name).verify()
