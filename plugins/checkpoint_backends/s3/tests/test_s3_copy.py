"""Checkpoints copied between a directory and the server, by the library and by the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_plugin_s3.storage import S3Storage
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import CheckpointFacts, list_checkpoints, verify
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.cli.checkpoint.copy import copy_checkpoint
from nxdt_core.errors.checkpoints import CheckpointDamaged, CheckpointNotSigned
from nxdt_core.protocols.store import CheckpointStore
from tests import processes
from tests.checkpoint.saving import save_checkpoint
from tests.checkpoint.signed import load_trusted, make_key
from tests.s3_server import S3Server
from tests.sampling import slow

STEP = 7
ELEMENTS = 11 * 2**18
"""Of float32, 11 MiB: three parts of an upload, and two blocks of digests."""


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    """A checkpoint in a directory, of several large files."""
    storage = LocalStorage(str(tmp_path / "checkpoints"))
    save_checkpoint(
        storage,
        step=STEP,
        model={"w": torch.arange(ELEMENTS, dtype=torch.float32)},
        optimizer={"w/exp_avg": torch.ones(ELEMENTS)},
        state={"position": 1},
        facts=CheckpointFacts(),
    )
    return storage


def content(storage: CheckpointStore) -> dict[str, bytes]:
    """All objects of the step."""
    found = {}
    for info in storage.list("step-"):
        with storage.open_read(info.key) as stream:
            found[info.key] = stream.read()
    return found


def test_there_and_back(local: LocalStorage, storage: S3Storage, tmp_path: Path) -> None:
    copy_checkpoint(local, storage, STEP, threads=4)
    assert verify(storage, STEP) == []
    back = LocalStorage(str(tmp_path / "back"))
    copy_checkpoint(storage, back, STEP, threads=4)
    assert content(back) == content(local)


def test_a_damaged_source_never_becomes_an_object(local: LocalStorage, storage: S3Storage) -> None:
    (shard,) = Path(local.uri).rglob("model/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=shard.name):
        copy_checkpoint(local, storage, STEP, threads=2)
    assert not [info.key for info in storage.list() if "/model/" in info.key]
    assert [status.state for status in list_checkpoints(storage)] in ([], ["unfinished"])


@pytest.mark.parametrize("objects", [slow(0), slow(2)])
def test_a_killed_command_is_finished_by_the_same_command(
    local: LocalStorage, storage: S3Storage, s3_server: S3Server, s3_uri: str, objects: int
) -> None:
    """Killed when some objects are there, whichever they are; those that are whole are not copied again.

    By default ``test_copying.py`` shows it of a directory, and the contract of stores that half an object is none.
    """
    command = [sys.executable, "-m", "nxdt_core", "checkpoint", "copy", local.uri, s3_uri, "--threads", "1", "--json"]
    environment = {**os.environ, "AWS_ENDPOINT_URL": s3_server.url}
    child = processes.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while len(list(storage.list())) < objects and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    whole = [info.key for info in storage.list() if info.key.endswith(".digests")]
    done = processes.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["files_copied"] == row["files"] - len(whole)
    assert content(storage) == content(local)
    again: Any = json.loads(processes.run(command, env=environment, capture_output=True, check=True).stdout)
    assert (again[0]["was_committed"], again[0]["files_copied"]) == (True, 0)


def test_a_signature_is_written_read_and_copied(storage: S3Storage, tmp_path: Path) -> None:
    signer, trusted = make_key(tmp_path, "own")
    save_checkpoint(
        storage, step=1, model={"w": torch.ones(3)}, optimizer={}, state={}, facts=CheckpointFacts(), signer=signer
    )
    load_trusted(storage, trusted)
    back = LocalStorage(str(tmp_path / "back"))
    copy_checkpoint(storage, back, 1)
    load_trusted(back, trusted)
    assert list_checkpoints(storage)[0].signed_by == trusted.fingerprints[0]
    (key,) = [info.key for info in storage.list() if info.key.endswith("manifest.sig")]
    storage.delete_many([key])
    with raises(CheckpointNotSigned):
        load_trusted(storage, trusted)
