"""A signature covers every byte that is loaded, and a run that requires one loads nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, PublicFormat
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import (
    Manifest,
    Signer,
    TrustedKeys,
    find_checkpoint,
    latest,
    list_checkpoints,
    prune,
    read_manifest,
    verify,
)
from nxdt_core.checkpoint.format.file_names import manifest_key, signature_key
from nxdt_core.checkpoint.format.manifest import digest, encode_manifest
from nxdt_core.checkpoint.signing import Signature, read_signature, write_signature
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint.copy import copy_checkpoint
from nxdt_core.errors.checkpoints import (
    CheckpointDamaged,
    CheckpointDigestsWeak,
    CheckpointIsNoFile,
    CheckpointNotSigned,
    CheckpointSignatureWrong,
    CheckpointSignedByOther,
    SigningKeyNotTrusted,
    SigningKeyUnusable,
    SigningLibraryMissing,
    StorageError,
)
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.importing import import_checkpoint
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.hf.exchange import save_run
from tests.checkpoint.memory import MemoryStorage
from tests.checkpoint.signed import load_trusted, make_key, write_key

FILES = (
    "manifest.json",
    "manifest.sig",
    "model/shard-00000-00000.safetensors",
    "model/shard-00000-00000.safetensors.digests",
    "optim/shard-00000-00000.safetensors",
    "optim/shard-00000-00000.safetensors.digests",
    "state/shard-00000-00000.safetensors",
    "state/shard-00000-00000.safetensors.digests",
    "state/rank-00000.json",
    "state/rank-00000.json.digests",
)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Signer, TrustedKeys]:
    return make_key(tmp_path, "own")


def path_of(store: LocalStorage, manifest: Manifest, name: str) -> Path:
    return Path(store.uri) / (manifest_key(manifest.step) if name == "manifest.json" else manifest.prefix + name)


def put_manifest(store: LocalStorage, manifest: Manifest) -> bytes:
    data = encode_manifest(manifest)
    (Path(store.uri) / manifest_key(manifest.step)).write_bytes(data)
    return data


def test_a_signed_checkpoint_loads_where_its_key_is_trusted(store: LocalStorage, save: Any, keys: Any) -> None:
    signer, trusted = keys
    manifest = save(store, 1, signer=signer)
    assert {path_of(store, manifest, name) for name in FILES} == {
        path for path in Path(store.uri).rglob("*") if path.is_file()
    }
    assert manifest.digests == "sha256"
    assert all(entry.digests_digest.startswith("sha256:") for entry in manifest.files.values())
    load_trusted(store, trusted)
    found = latest(store, warn=pytest.fail, trusted=trusted)
    assert found == read_manifest(store, 1) == manifest
    assert list_checkpoints(store)[0].signed_by == trusted.fingerprints[0]
    assert verify(store, 1) == []


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_of_any_file_is_refused(store: LocalStorage, save: Any, keys: Any, name: str) -> None:
    signer, trusted = keys
    path = path_of(store, save(store, 1, signer=signer), name)
    good = path.read_bytes()
    for place in {0, len(good) // 3, len(good) // 2, len(good) - 1}:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(StorageError):
            load_trusted(store, trusted)
    path.write_bytes(good)
    load_trusted(store, trusted)


def test_changed_weights_with_new_digests_are_refused(store: LocalStorage, save: Any, keys: Any) -> None:
    """Anybody who can write the files can compute every digest, but not the signature."""
    signer, trusted = keys
    signature = read_signature(store, save(store, 1, signer=signer))
    forged = save(store, 1, model={}, signer=make_key(Path(store.uri).parent, "other")[0])
    with raises(CheckpointSignedByOther) as raised:
        find_checkpoint(store, None, warn=print, trusted=trusted)
    assert trusted.fingerprints[0] in str(raised.value)
    assert signature is not None
    write_signature(store, forged, signature)
    for step in (1, None):
        with pytest.raises(CheckpointSignatureWrong):
            find_checkpoint(store, step, warn=print, trusted=trusted)
    assert find_checkpoint(store, 1, warn=print) == forged  # no signature is required here


def test_a_checkpoint_without_a_signature_is_refused_and_not_passed_over(
    store: LocalStorage, save: Any, keys: Any
) -> None:
    signer, trusted = keys
    save(store, 1, signer=signer)
    manifest = save(store, 2)
    for step in (2, None):
        with raises(CheckpointNotSigned, match="not signed"):
            find_checkpoint(store, step, warn=pytest.fail, trusted=trusted)
    assert find_checkpoint(store, None, warn=pytest.fail) == manifest
    assert [status.signed_by for status in list_checkpoints(store)] == [*trusted.fingerprints, ""]


def test_a_signature_of_a_manifest_with_fast_digests_proves_nothing(store: LocalStorage, save: Any, keys: Any) -> None:
    signer, trusted = keys
    manifest = save(store, 1)
    write_signature(store, manifest, signer.sign(encode_manifest(manifest)))
    with raises(CheckpointDigestsWeak, match="xxh3_128"):
        find_checkpoint(store, 1, warn=print, trusted=trusted)


def test_fast_digests_below_a_signed_manifest_are_damage(store: LocalStorage, save: Any, keys: Any) -> None:
    """The manifest names the file of digests by SHA-256, but that holds fast ones."""
    signer, trusted = keys
    weak, manifest = save(store, 1), save(store, 2, signer=signer)
    name = "state/rank-00000.json"
    content = path_of(store, weak, f"{name}.digests").read_bytes()
    path_of(store, manifest, name).write_bytes(path_of(store, weak, name).read_bytes())
    path_of(store, manifest, f"{name}.digests").write_bytes(content)
    entry = dataclasses.replace(weak.files[name], digests_bytes=len(content), digests_digest=digest(content, "sha256"))
    changed = dataclasses.replace(manifest, files={**manifest.files, name: entry})
    write_signature(store, changed, signer.sign(put_manifest(store, changed)))
    with pytest.raises(CheckpointDamaged, match="its digests are xxh3_128"):
        load_trusted(store, trusted, step=2)


def test_a_signed_checkpoint_under_another_step_is_refused(store: LocalStorage, save: Any, keys: Any) -> None:
    signer, trusted = keys
    save(store, 1, signer=signer)
    (Path(store.uri) / "step-00000001").rename(Path(store.uri) / "step-00000009")
    with pytest.raises(CheckpointDamaged, match="manifest of step 1"):
        find_checkpoint(store, 9, warn=print, trusted=trusted)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 2000, b" " * 5000, b'{"public_key":1}', b"\xff"],
    ids=["nothing", "table", "deep lists", "spaces", "number as key", "no text"],
)
def test_a_file_that_is_no_signature_is_named(store: LocalStorage, save: Any, keys: Any, content: bytes) -> None:
    signer, trusted = keys
    manifest = save(store, 1, signer=signer)
    path_of(store, manifest, "manifest.sig").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.sig"):
        load_trusted(store, trusted)
    assert list_checkpoints(store)[0].signed_by == ""


def test_a_signature_file_is_read_up_to_a_bound(store: LocalStorage, save: Any, keys: Any) -> None:
    manifest = save(store, 1, signer=keys[0])
    path = path_of(store, manifest, "manifest.sig")
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointDamaged, match="more than 4096 bytes"):
        read_signature(store, manifest)


def test_a_link_in_the_place_of_a_signature_is_not_followed(store: LocalStorage, save: Any, keys: Any) -> None:
    signer, trusted = keys
    path = path_of(store, save(store, 1, signer=signer), "manifest.sig")
    moved = path.rename(Path(store.uri).parent / "moved.sig")
    path.symlink_to(moved)
    with raises(CheckpointIsNoFile):
        load_trusted(store, trusted)


def test_a_save_that_replaces_a_step_leaves_the_older_one_whole_until_it_is_committed(
    store: LocalStorage, save: Any, keys: Any
) -> None:
    signer, trusted = keys
    save(store, 1, signer=signer)

    def crash() -> None:
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        save(store, 1, model={}, signer=signer, before_commit=crash)
    load_trusted(store, trusted)
    save(store, 1, signer=signer)
    load_trusted(store, trusted)
    assert [info.key for info in store.list() if info.key.endswith("manifest.sig")] == [
        signature_key(1, read_manifest(store, 1).attempt)
    ]


def test_an_unusable_key_prevents_the_commit(store: LocalStorage, save: Any, tmp_path: Path) -> None:
    with raises(SigningKeyUnusable, match="No such file"):
        save(store, 1, signer=Signer(tmp_path / "missing.pem"))
    assert list_checkpoints(store) == []


def test_prune_deletes_a_signature_with_its_step(store: LocalStorage, save: Any, keys: Any) -> None:
    for step in (1, 2):
        save(store, step, signer=keys[0])
    assert prune(store, 1) == [1]
    assert not (Path(store.uri) / "step-00000001").exists()
    load_trusted(store, keys[1], step=2)


def test_a_copy_keeps_the_signature(store: LocalStorage, save: Any, keys: Any, tmp_path: Path) -> None:
    signer, trusted = keys
    manifest = save(store, 1, signer=signer)
    target = LocalStorage(str(tmp_path / "copy"))
    copy_checkpoint(store, target, 1)
    load_trusted(target, trusted)
    path_of(target, manifest, "manifest.sig").unlink()
    assert copy_checkpoint(store, target, 1).was_committed
    load_trusted(target, trusted)
    path_of(store, manifest, "manifest.sig").write_bytes(b"damaged")
    with pytest.raises(CheckpointDamaged, match=r"manifest\.sig"):
        copy_checkpoint(store, LocalStorage(str(tmp_path / "second")), 1)


def test_the_fingerprint_is_that_of_the_public_key_in_der(store: LocalStorage, save: Any, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private, _ = write_key(tmp_path / "key.pem", key)
    signature = read_signature(store, save(store, 1, signer=Signer(private)))
    assert signature is not None
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert signature.fingerprint == f"sha256:{hashlib.sha256(der).hexdigest()}"
    key.public_key().verify(signature.signature, (Path(store.uri) / manifest_key(1)).read_bytes())
    assert Signature.decode(signature.encode()) == signature
    assert json.loads(signature.encode())["fingerprint"] == signature.fingerprint


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_documented_commands_make_usable_keys_and_print_the_fingerprint(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("openssl ")]
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    trusted = TrustedKeys([tmp_path / "sign.pub.pem"])
    Signer(tmp_path / "sign.pem").check(trusted)
    assert trusted.fingerprints == (f"sha256:{done.stdout.split()[0]}",)


def test_keys_of_another_kind_are_refused(tmp_path: Path, store: LocalStorage, save: Any) -> None:
    private, public = write_key(tmp_path / "rsa.pem", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    with raises(SigningKeyUnusable, match="RSAPrivateKey, not an Ed25519 key"):
        Signer(private).check(None)
    with raises(SigningKeyUnusable, match="RSAPublicKey, not an Ed25519 key"):
        find_checkpoint(store, save(store, 1).step, warn=print, trusted=TrustedKeys([public]))


def test_files_that_hold_no_key_are_named_with_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no key")
    with raises(SigningKeyUnusable, match="openssl genpkey"):
        Signer(tmp_path / "text.pem").check(None)
    private, _ = write_key(tmp_path / "key.pem", Ed25519PrivateKey.generate())
    with raises(SigningKeyUnusable, match="does not hold a public key"):
        _ = TrustedKeys([private]).fingerprints
    encrypted = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (tmp_path / "encrypted.pem").write_bytes(encrypted)
    with raises(SigningKeyUnusable, match="passphrase"):
        Signer(tmp_path / "encrypted.pem").check(None)


def test_a_run_that_would_refuse_its_own_checkpoints_is_told(tmp_path: Path) -> None:
    signer, trusted = make_key(tmp_path, "own")
    signer.check(trusted)
    with raises(SigningKeyNotTrusted, match="Add its public key"):
        signer.check(make_key(tmp_path, "other")[1])


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    write_key(tmp_path / "k.pem", Ed25519PrivateKey.generate())
    code = """
import sys
sys.modules["cryptography"] = None
from nxdt_core.checkpoint import Signer, TrustedKeys, latest
from nxdt_core.errors.checkpoints import StorageError
for work in (lambda: Signer("k.pem").check(None), lambda: TrustedKeys(["k.pub"]).fingerprints):
    try:
        work()
    except StorageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'nxdt-core[sign]'") == 2
    assert done.stdout.count(f"[{SigningLibraryMissing.code}]") == 2


def test_a_signed_save_that_fails_at_any_call_leaves_a_signed_checkpoint(save: Any, keys: Any) -> None:
    signer, trusted = keys

    def build() -> MemoryStorage:
        storage = MemoryStorage()
        save(storage, 1, signer=signer)
        return storage

    counting = FaultyStorage(build())
    save(counting, 1, signer=signer)
    for call in range(counting.calls):
        storage = build()
        with suppress(StorageError):
            save(FaultyStorage(storage, call), 1, signer=signer)
        load_trusted(storage, trusted)


def test_an_import_can_be_signed(tmp_path: Path, keys: Any) -> None:
    _, trusted = keys
    save_run(str(tmp_path / "run"), (), None)
    export_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
    key = f"checkpoint.sign.key={tmp_path / 'own.pem'}"
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "store"), overrides=[key])
    load_trusted(LocalStorage(str(tmp_path / "store")), trusted, step=0)
