"""``nxdt checkpoint`` over a store with a good, an unfinished and a damaged checkpoint."""

import json

import pytest
import torch

from nxdt_core.checkpoint import CheckpointFacts, open_storage, save_checkpoint


@pytest.fixture
def store(tmp_path):
    """Address of a store: step 10 is good, 20 has a flipped byte, 30 has no manifest."""
    uri = str(tmp_path / "store")
    storage = open_storage(uri)
    for step in (10, 20, 30):
        save_checkpoint(
            storage,
            step=step,
            model={"weight": torch.arange(1000.0)},
            optimizer={"weight/exp_avg": torch.zeros(1000)},
            state={"step": step},
            facts=CheckpointFacts(consumed_samples=step, consumed_tokens=step),
        )
    shard = next((tmp_path / "store" / "step-00000020").rglob("model/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    (tmp_path / "store" / "step-00000030" / "manifest.json").unlink()
    return uri


def test_list_json_has_the_promised_shape(nxdt, store):
    rows = json.loads(nxdt("checkpoint", "list", store, "--json").stdout)
    assert [(row["step"], row["state"]) for row in rows] == [(10, "committed"), (20, "committed"), (30, "unfinished")]
    assert all(set(row) == {"step", "state", "uri", "size_bytes"} for row in rows)
    assert rows[0]["uri"].endswith("store/step-00000010")
    assert rows[0]["size_bytes"] > 8000


def test_list_prints_a_table(nxdt, store):
    header, *lines = nxdt("checkpoint", "list", store).stdout.splitlines()
    assert header.split() == ["STEP", "STATE", "SIZE", "URI"]
    assert [line.split()[:2] for line in lines] == [["10", "committed"], ["20", "committed"], ["30", "unfinished"]]


def test_neither_command_imports_torch(nxdt, store):
    assert nxdt("checkpoint", "list", store, without=("torch", "numpy")).returncode == 0
    assert nxdt("checkpoint", "verify", f"{store}/step-00000010", without=("torch", "numpy")).returncode == 0


def test_verify_names_the_damaged_file_and_fails(nxdt, store):
    done = nxdt("checkpoint", "verify", store)
    assert done.returncode == 1
    (damaged,) = [line for line in done.stdout.splitlines() if "damaged" in line]
    assert damaged.split()[0] == "20"
    assert ".safetensors" in damaged


def test_verify_json(nxdt, store):
    rows = json.loads(nxdt("checkpoint", "verify", store, "--json").stdout)
    assert [(row["step"], bool(row["problems"])) for row in rows] == [(10, False), (20, True)]


def test_verify_of_one_step(nxdt, store):
    assert nxdt("checkpoint", "verify", f"{store}/step-00000010").returncode == 0
    assert nxdt("checkpoint", "verify", f"{store}/step-00000030").returncode == 2


def test_an_empty_address_lists_nothing_and_verifies_nothing(nxdt, tmp_path):
    assert json.loads(nxdt("checkpoint", "list", str(tmp_path / "none"), "--json").stdout) == []
    done = nxdt("checkpoint", "verify", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "[NXDT-S011]" in done.stderr


def test_an_unknown_scheme_is_one_message(nxdt):
    done = nxdt("checkpoint", "list", "tape://vault/run")
    assert done.returncode == 2
    assert "tape" in done.stderr
    assert "Traceback" not in done.stderr
