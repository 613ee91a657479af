"""``nxdt checkpoint list`` and ``verify`` over a store with a good, an unfinished and a damaged checkpoint."""

import json
import shutil
from datetime import UTC, datetime


def test_list_json_has_the_promised_shape(nxdt, store):
    rows = json.loads(nxdt("checkpoint", "list", store, "--json").stdout)
    assert [(row["step"], row["state"]) for row in rows] == [(10, "committed"), (20, "committed"), (30, "unfinished")]
    assert list(rows[0]) == [
        *("step", "state", "uri", "size_bytes", "created", "mesh", "metrics"),
        *("consumed_samples", "consumed_tokens", "problem", "archive", "signed_by"),
    ]
    assert rows[0]["mesh"] == {"pp": 1, "dp": 2}
    assert rows[0]["metrics"] == {"loss": 1.5}
    assert (rows[0]["consumed_samples"], rows[0]["consumed_tokens"]) == (10, 100)
    assert datetime.fromisoformat(rows[0]["created"]).tzinfo is UTC
    assert rows[2]["created"] is None
    assert rows[0]["uri"].endswith("store/step-00000010")
    assert rows[0]["size_bytes"] > 8000


def test_a_directory_of_runs_is_told_from_an_empty_one(nxdt, store, tmp_path):
    runs = tmp_path / "runs"
    for name in ("second", "first"):
        shutil.copytree(store, runs / name / "checkpoints")
    (runs / "notes").mkdir()
    said = " ".join(nxdt("checkpoint", "list", str(runs)).stderr.split())
    assert said.endswith("it is a directory of runs; name one of 'first', 'second'.")
    assert nxdt("checkpoint", "list", str(runs / "notes")).stderr.endswith("no run has saved anything there.\n")


def test_list_prints_a_table(nxdt, store):
    where, header, *lines = nxdt("checkpoint", "list", store).stdout.splitlines()
    assert where == f"checkpoints: {store}"
    assert header.split() == ["STEP", "TIME", "(UTC)", "STATE", "SIZE", "MESH", "METRICS"]
    assert lines[0].split()[3:] == ["committed", "9.6", "KiB", "dp2", "loss=1.5"]
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].split()[:2] == ["30", "unfinished"]


def test_neither_command_imports_torch(nxdt_without, store, tmp_path):
    """Nor do ``inspect`` and ``copy``."""
    one = f"{store}/step-00000010"
    commands = (("list", store), ("verify", one), ("inspect", store), ("copy", one, str(tmp_path / "to")))
    done = nxdt_without(("torch", "numpy"), [("checkpoint", *words) for words in commands])
    assert done.returncode == 0, done.stderr


def test_verify_sees_what_is_lost_and_reads_no_tensor(nxdt, store, shard_of):
    assert nxdt("checkpoint", "verify", store).returncode == 0
    shard_of(store, 10).unlink()
    done = nxdt("checkpoint", "verify", store)
    assert done.returncode == 1
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["damaged", "ok"]


def test_verify_sees_a_changed_file_of_digests(nxdt, store, shard_of):
    digests = shard_of(store, 10).with_suffix(".safetensors.digests")
    digests.write_bytes(digests.read_bytes().replace(b"xxh3_128", b"xxh3_127"))
    done = nxdt("checkpoint", "verify", f"{store}/step-00000010")
    assert done.returncode == 1
    assert digests.name in done.stdout


def test_deep_verify_names_the_damaged_file_and_fails(nxdt, store):
    done = nxdt("checkpoint", "verify", store, "--deep")
    assert done.returncode == 1
    (damaged,) = [line for line in done.stdout.splitlines() if "damaged" in line]
    assert damaged.split()[0] == "20"
    assert ".safetensors" in damaged


def test_verify_json(nxdt, store):
    rows = json.loads(nxdt("checkpoint", "verify", store, "--deep", "--json").stdout)
    assert [list(row) for row in rows] == [["step", "problems", "signed_by"]] * 2
    assert [(row["step"], bool(row["problems"])) for row in rows] == [(10, False), (20, True)]


def test_verify_of_one_step(nxdt, store):
    assert nxdt("checkpoint", "verify", f"{store}/step-00000010").returncode == 0
    assert nxdt("checkpoint", "verify", f"{store}/step-00000030").returncode == 2


def test_an_empty_address_lists_nothing_and_verifies_nothing(nxdt, tmp_path):
    assert json.loads(nxdt("checkpoint", "list", str(tmp_path / "none"), "--json").stdout) == []
    done = nxdt("checkpoint", "verify", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "[NXDT-S011]" in done.stderr


def test_the_directory_of_a_run_stands_for_its_checkpoints(nxdt, store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(store)
    for words in (("list",), ("verify",), ("inspect",), ("prune", "--keep-last", "9")):
        done = nxdt("checkpoint", words[0], str(tmp_path / "run"), *words[1:])
        assert done.returncode == 0, done.stderr


def test_what_has_no_checkpoints_says_what_it_is(nxdt, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"")
    (run := tmp_path / "run").mkdir()
    (run / "config.yaml").write_text("checkpoint: {uri: 's3://bucket/run'}\n")
    for path, reason in (
        (other, f"'nxdt checkpoint import {other} DST' reads"),
        (run, "it is the directory of a run, whose checkpoints are at s3://bucket/run"),
        (tmp_path / "none", "it does not exist."),
        ("Qwen/Qwen2.5-0.5B", "a model of the Hugging Face hub is hf:Qwen/Qwen2.5-0.5B"),
    ):
        done = nxdt("checkpoint", "verify", str(path))
        assert done.returncode == 2
        assert reason in " ".join(done.stderr.split()), path
    done = nxdt("generate", str(tmp_path / "none"), "hi")  # which takes runs and Hugging Face directories themselves
    assert done.returncode == 2
    assert "it does not exist" in " ".join(done.stderr.split())


def test_an_unknown_scheme_is_one_message(nxdt):
    done = nxdt("checkpoint", "list", "tape://vault/run")
    assert done.returncode == 2
    assert "tape" in done.stderr
    assert "Traceback" not in done.stderr
