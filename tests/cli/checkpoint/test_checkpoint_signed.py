"""Signatures on the command line: ``verify``, ``list``, ``inspect`` and ``copy``."""

import json

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nxdt_core.checkpoint import CheckpointFacts, Signer, TrustedKeys, open_storage
from tests.checkpoint.saving import save_checkpoint
from tests.checkpoint.signed import write_key


def save(where, step, private=None):
    save_checkpoint(
        open_storage(str(where)),
        step=step,
        model={"w": torch.ones(3)},
        optimizer={},
        state={},
        facts=CheckpointFacts(),
        signer=None if private is None else Signer(private),
    )


@pytest.fixture
def keys(tmp_path):
    """Private and public file of two keys."""
    return [write_key(tmp_path / f"{name}.pem", Ed25519PrivateKey.generate()) for name in ("own", "other")]


@pytest.fixture
def signed(tmp_path, keys):
    """Step 1 unsigned, 2 and 3 signed by one key each."""
    for step, private in ((1, None), (2, keys[0][0]), (3, keys[1][0])):
        save(tmp_path / "signed", step, private)
    return str(tmp_path / "signed")


def fingerprint(key):
    return TrustedKeys([key[1]]).fingerprints[0]


def test_verify_says_who_signed_and_refuses_others_only_where_told(nxdt, signed, keys):
    done = nxdt("checkpoint", "verify", signed)
    assert done.returncode == 0
    assert f"signed by {fingerprint(keys[0])}" in done.stdout
    own, other = ("--trusted", keys[0][1]), ("--trusted", keys[1][1])
    done = nxdt("checkpoint", "verify", signed, *own)
    assert done.returncode == 1
    assert [("not trusted" in line, " ok " in line) for line in done.stdout.splitlines()[1:]] == [
        *((True, False), (False, True), (True, False))
    ]
    assert "it has no signature" in done.stdout
    assert f"it is signed by {fingerprint(keys[1])}, which is not a trusted key" in done.stdout
    for step in (2, 3):
        assert nxdt("checkpoint", "verify", f"{signed}/step-0000000{step}", *own, *other, "--deep").returncode == 0


def test_a_wrong_signature_is_damage(nxdt, signed, tmp_path):
    _, two, three = sorted((tmp_path / "signed").glob("step-*"))
    next(two.rglob("manifest.sig")).write_bytes(next(three.rglob("manifest.sig")).read_bytes())
    done = nxdt("checkpoint", "verify", str(two))
    assert done.returncode == 1
    assert "damaged" in done.stdout
    assert "its signature is wrong" in done.stdout
    next(two.rglob("manifest.sig")).write_bytes(b"x")
    done = nxdt("checkpoint", "verify", str(two), "--json")
    (row,) = json.loads(done.stdout)
    assert (done.returncode, row["signed_by"]) == (1, None)
    assert "manifest.sig: it is not" in row["problems"][0]


def test_list_and_inspect_name_the_key_without_the_library(nxdt, signed, keys):
    rows = json.loads(nxdt("checkpoint", "list", signed, "--json", without=("cryptography",)).stdout)
    assert [row["signed_by"] for row in rows] == [None, fingerprint(keys[0]), fingerprint(keys[1])]
    words = ("checkpoint", "inspect", signed)
    found = nxdt(*words, "--json", without=("cryptography",), fork=True)
    assert json.loads(found.stdout)["signed_by"] == fingerprint(keys[1])
    assert fingerprint(keys[1]) in nxdt(*words).stdout


def test_verify_without_the_library_says_what_to_install(nxdt, signed, keys):
    unsigned = f"{signed}/step-00000001"
    assert nxdt("checkpoint", "verify", unsigned, without=("cryptography",)).returncode == 0
    done = nxdt("checkpoint", "verify", signed, without=("cryptography",), fork=True)
    assert done.returncode == 2
    assert "pip install 'nxdt-core[sign]'" in done.stderr


def test_a_copy_is_signed(nxdt, signed, keys, tmp_path):
    target = str(tmp_path / "copied")
    assert nxdt("checkpoint", "copy", f"{signed}/step-00000002", target).returncode == 0
    assert nxdt("checkpoint", "verify", target, "--deep", "--trusted", keys[0][1]).returncode == 0


def test_copy_takes_only_what_a_trusted_key_has_signed_where_told(nxdt, signed, keys, tmp_path):
    own = ("--trusted", keys[0][1])
    for step in (1, 3):
        done = nxdt("checkpoint", "copy", f"{signed}/step-0000000{step}", str(tmp_path / "copied"), *own)
        assert done.returncode == 2
        assert "NXDT-S13" in done.stderr
    assert not list((tmp_path / "copied").rglob("manifest.json"))
    done = nxdt("checkpoint", "copy", f"{signed}/step-00000002", str(tmp_path / "copied"), *own)
    assert done.returncode == 0
