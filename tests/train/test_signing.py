"""Runs that sign their checkpoints, and runs that load signed ones only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointManager, TrustedKeys
from nxdt_core.checkpoint.signing import Signature
from nxdt_core.cli import main
from nxdt_core.errors.checkpoints import (
    CheckpointNotSigned,
    CheckpointSignedByOther,
    SigningKeyNotTrusted,
    SigningKeyUnusable,
)
from nxdt_core.run import train
from nxdt_core.run.start import decide_start
from nxdt_core.train import TrainSession, build
from tests.checkpoint.signed import load_trusted, write_key
from tests.train.small import SMALL

RESUME = "checkpoint.resume_if_exists=true"


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, Path]:
    return write_key(tmp_path / "own.pem", Ed25519PrivateKey.generate())


def signing(key: tuple[Path, Path]) -> list[str]:
    return [f"checkpoint.sign.key={key[0]}", f"checkpoint.sign.trusted=['{key[1]}']"]


def train_on_this_rank(arguments):
    return main(arguments)


def train_and_say_which_are_opened(arguments, files):
    opened = set()
    sys.addaudithook(lambda event, values: opened.add(str(values[0])) if event == "open" else None)
    assert main(arguments) == 0
    return [str(file) in opened for file in files]


def test_two_ranks_sign_save_and_resume(tmp_path, key):
    settings = [*signing(key), "trainer.devices=2", "name=two", "checkpoint.hf_every_n_saves=1"]
    words = ["train", "recipe:llama-tiny", *SMALL, *settings, f"exp_manager.exp_dir={tmp_path}"]
    pool = RankPool(2)
    assert pool.run(train_on_this_rank, [*words, "trainer.max_steps=1"], timeout_s=120) == [0, 0]
    assert pool.run(train_on_this_rank, [*words, "trainer.max_steps=2", RESUME], timeout_s=120) == [0, 0]
    store = checkpoint.open_storage(str(tmp_path / "two/checkpoints"))
    manifest = checkpoint.read_manifest(store, 2)
    assert checkpoint.saved_ranks(manifest) == 2
    assert any(name.startswith("hf/") for name in manifest.files)
    covered = {manifest.prefix + name + end for name in manifest.files for end in ("", ".digests")}
    present = {info.key for info in store.list(manifest.prefix)}
    assert present - covered == {f"{manifest.prefix}manifest.sig"}
    load_trusted(store, TrustedKeys([key[1]]), step=2)


def test_keys_are_read_by_the_first_rank_only(tmp_path, key):
    settings = [*signing(key), "trainer.devices=2", "name=two"]
    words = ["train", "recipe:llama-tiny", *SMALL, *settings, f"exp_manager.exp_dir={tmp_path}"]
    pool = RankPool(2)
    assert pool.run(train_and_say_which_are_opened, [*words, "trainer.max_steps=1"], key, timeout_s=120)[1][0] is False
    opened = pool.run(train_and_say_which_are_opened, [*words, "trainer.max_steps=2", RESUME], key, timeout_s=120)
    assert opened == [[True, True], [False, False]]


def test_the_key_is_in_no_file_of_a_run_and_its_path_is_in_the_configuration(small_run, key):
    config = small_run("trainer.max_steps=1", *signing(key), "checkpoint.hf_every_n_saves=1")
    train(config)
    raw = load_pem_private_key(key[0].read_bytes(), None).private_bytes_raw()
    forms = (key[0].read_bytes().splitlines()[1], raw, raw.hex().encode())
    files = [path for path in config.run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if any(form in path.read_bytes() for form in forms)] == []
    manifest = checkpoint.read_manifest(build.storage(config), 1)
    assert manifest.facts.config["checkpoint"]["sign"]["key"] == str(key[0])


def test_a_run_refuses_what_a_trusted_key_has_not_signed(small_run, key, tmp_path):
    train(small_run("trainer.max_steps=1", name="plain"))
    trusting = [f"checkpoint.sign.trusted=['{key[1]}']", "trainer.max_steps=2"]
    plain = str(tmp_path / "plain/checkpoints")
    with raises(CheckpointNotSigned, match=r"checkpoint\.sign\.trusted"):
        train(small_run(*trusting, RESUME, "checkpoint.resume_ignore_no_checkpoint=true", name="plain"))
    for weights_only in ("true", "false"):
        start = [f"checkpoint.resume_from={plain}", f"checkpoint.weight_init_only={weights_only}"]
        with raises(CheckpointNotSigned):
            train(small_run(*trusting, *start, name=f"weights-{weights_only}"))
    other = write_key(tmp_path / "other.pem", Ed25519PrivateKey.generate())
    train(small_run("trainer.max_steps=1", *signing(other), name="other"))
    with raises(CheckpointSignedByOther):
        train(small_run(*trusting, f"checkpoint.resume_from={tmp_path}/other/checkpoints", name="third"))


def test_a_manifest_that_changes_after_it_was_checked_is_not_read_again(small_run, key, monkeypatch):
    config = small_run("trainer.max_steps=1", *signing(key), name="run")
    train(config)
    store = build.storage(config)

    def decide_then_forge(*arguments, **keywords):
        start = decide_start(*arguments, **keywords)
        manifest = checkpoint.read_manifest(store, 1)
        path = next(Path(store.uri).rglob("manifest.sig"))
        forged = Signature(public_key=Signature.decode(path.read_bytes()).public_key, signature=bytes(64))
        path.write_bytes(forged.encode())
        path.with_name("manifest.json").write_text("{}")
        assert start.manifest == manifest
        return start

    monkeypatch.setattr("nxdt_core.run.training.decide_start", decide_then_forge)
    assert train(small_run("trainer.max_steps=2", *signing(key), RESUME, name="run")).step == 2


def test_checkpoints_of_other_programs_are_refused_where_a_signature_is_required(small_run, key, tmp_path):
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model.safetensors").write_bytes(b"")
    start = [f"checkpoint.resume_from={directory}", "checkpoint.weight_init_only=true"]
    with raises(CheckpointNotSigned, match="another program"):
        train(small_run(f"checkpoint.sign.trusted=['{key[1]}']", *start, name="run"))


def test_unusable_keys_stop_a_run_before_it_writes(small_run, key, tmp_path):
    wrong = write_key(tmp_path / "rsa.pem", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    with raises(SigningKeyUnusable, match="RSAPrivateKey"):
        train(small_run(f"checkpoint.sign.key={wrong[0]}", name="run"))
    with raises(SigningKeyUnusable, match="RSAPublicKey"):
        train(small_run(f"checkpoint.sign.trusted=['{wrong[1]}']", name="run"))
    other = write_key(tmp_path / "other.pem", Ed25519PrivateKey.generate())
    with raises(SigningKeyNotTrusted):
        train(small_run(f"checkpoint.sign.key={key[0]}", f"checkpoint.sign.trusted=['{other[1]}']", name="run"))
    assert not (tmp_path / "run").exists()


def test_the_path_of_the_key_may_come_from_the_environment(small_run, key, monkeypatch):
    setting = "checkpoint.sign.key=${oc.env:NXDT_SIGNING_KEY,null}"
    assert build.signer(small_run(setting)) is None
    monkeypatch.setenv("NXDT_SIGNING_KEY", str(key[0]))
    signer = build.signer(small_run(setting))
    assert signer is not None
    assert signer.public_key == build.signer(small_run(f"checkpoint.sign.key={key[0]}")).public_key


def test_a_key_to_sign_with_and_trusted_ones_may_be_set_alone(small_run, key, tmp_path):
    sign, trust = signing(key)
    train(small_run("trainer.max_steps=1", sign, name="signed"))
    start = (f"checkpoint.resume_from={tmp_path}/signed/checkpoints", "checkpoint.weight_init_only=true")
    train(small_run("trainer.max_steps=1", trust, *start, name="trusting"))
    with raises(CheckpointNotSigned):
        train(small_run("trainer.max_steps=2", trust, RESUME, name="trusting"))


def test_a_loop_of_ones_own_signs_and_checks_as_configured(small_run, key):
    config = small_run("trainer.max_steps=2", *signing(key))
    store, trusted = build.storage(config), build.trusted_keys(config)
    with TrainSession(config) as session:
        session.save()
        manager = CheckpointManager(store, signer=build.signer(config))
        session.step(next(iter(session.batches())))
        session.save(manager, asynchronous=True)
        manager.wait()
    for step in (0, 1):
        load_trusted(store, trusted, step)
        checkpoint.read_manifest(store, step, trusted=trusted)
    with TrainSession(config) as session:
        assert session.resume().step == 1
    next((config.run_dir / "checkpoints" / "step-00000001").rglob("manifest.sig")).unlink()
    with TrainSession(config) as session, raises(CheckpointNotSigned):
        session.resume()
    with raises(CheckpointNotSigned):
        checkpoint.latest(store, warn=print, trusted=trusted)
    with raises(CheckpointNotSigned):
        checkpoint.read_manifest(store, 1, trusted=trusted)


def test_an_export_of_a_signed_checkpoint_has_no_signature(small_run, key, tmp_path):
    config = small_run("trainer.max_steps=1", *signing(key))
    train(config)
    assert main(["checkpoint", "export", config.checkpoint_uri, str(tmp_path / "out")]) == 0
    assert "model.safetensors" in {path.name for path in (tmp_path / "out").iterdir()}
    assert list((tmp_path / "out").rglob("*.sig")) == []
