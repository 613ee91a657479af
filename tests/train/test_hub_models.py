"""Runs from models and data of the Hugging Face hub, and exports that are pushed there, against a hub on 127.0.0.1."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml

from tests import processes
from tests.hub_server import WRITER, HubServer, run_commands

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to start from")
pytest.importorskip("huggingface_hub", "1.31", reason="huggingface_hub is not installed, or too old: no names")

RUN = """\
name: run
checkpoint: {resume_from: "hf:owner/small", resume_if_exists: true, resume_ignore_no_checkpoint: true}
data:
  name: sft-chat
  train_files: ["hf:owner/chats/**/*.parquet"]
  validation_files: ["hf:owner/chats/validation.jsonl"]
trainer: {max_steps: 2, log_every_n_steps: 1}
"""
LOCAL = (
    "checkpoint.resume_from=model",
    "data.train_files=[data/chats.parquet]",
    "data.validation_files=[validation.jsonl]",
    "name=local",
)
CHATS = (files("nxdt_plugin_sft_chat") / "data" / "library.jsonl").read_bytes()


def weights(seed):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(files("nxdt_plugin_sft_chat") / "data" / "tokenizer"))
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config), tokenizer


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory with the same model and data as the hub has them, and the server."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no Parquet")
    import pyarrow.parquet as parquet

    root = tmp_path_factory.mktemp("published")
    model, tokenizer = weights(0)
    for directory in ("model", "moved"):
        model.save_pretrained(root / directory, max_shard_size="200KB")
        tokenizer.save_pretrained(root / directory)
        model, _ = weights(1)
    table, stream = pyarrow.Table.from_pylist(list(map(json.loads, CHATS.splitlines()))), io.BytesIO()
    parquet.write_table(table, stream)
    (root / "data").mkdir()
    (root / "data" / "chats.parquet").write_bytes(stream.getvalue())
    (root / "validation.jsonl").write_bytes(CHATS)
    (root / "run.yaml").write_text(RUN)
    with HubServer() as server:
        others = {"modeling_x.py": b"1", "consolidated.safetensors": b"2", "onnx/model.safetensors": b"3"}
        server.commit("model", "owner/small", {**content(root / "model"), **others})
        server.commit(
            "dataset",
            "owner/chats",
            {"data/chats.parquet": stream.getvalue(), "validation.jsonl": CHATS, "x.py": b"1", "other.jsonl": b"{}"},
        )
        yield root, server


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return {row["step"]: row["loss"] for row in rows(run)}


def test_a_run_reads_the_hub_once_and_resumes_with_the_commit_that_it_began_with(published, tmp_path):
    root, server = published
    first = server.repositories["model", "owner/small"].refs["main"]
    variables, train = server.environment(tmp_path / "cache"), ("train", "run.yaml")
    server.breaks = {"model-00001-of-00002.safetensors": [1000, 0]}
    (status, text), (local, _), _ = run_commands([train, (*train, *LOCAL)], variables, root)
    assert (status, local) == (0, 0), text
    assert f"starting from the weights of hf:owner/small@main@{first}" in text
    assert sorted(server.read) == sorted([*content(root / "model"), "data/chats.parquet", "validation.jsonl"])
    runs = root / "nxdt_experiments"
    assert losses(runs / "run") == losses(runs / "local")

    server.commit("model", "owner/small", content(root / "moved"))
    asked = len(server.read)
    (status, text), (other, _), _ = run_commands(
        [(*train, "trainer.max_steps=3"), (*train, "trainer.max_steps=3", *LOCAL)], variables, root
    )
    assert (status, other, len(server.read)) == (0, 0, asked), text
    assert losses(runs / "run") == losses(runs / "local")
    kept = yaml.safe_load((runs / "run" / "config.yaml").read_text())
    manifest = json.loads((runs / "run" / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    for config in (kept, manifest["config"]):
        assert config["checkpoint"]["resume_from"] == f"hf:owner/small@main@{first}"
        assert config["data"]["tokenizer"]["model"] == f"hf:owner/small@main@{first}"


def test_an_export_that_is_pushed_is_the_start_of_runs_as_its_directory_is(published, tmp_path):
    root, server = published
    variables = server.environment(tmp_path / "cache")
    export = ("checkpoint", "export", "nxdt_experiments/exported", str(tmp_path / "out"), "--push", "owner/new")
    sampled = ("Where is it?", "--chat", "--max-new-tokens=8")
    (_, _), (refused, text), (status, said), *others, _ = run_commands(
        [
            ("train", "run.yaml", *LOCAL, "name=exported"),
            ("token=hf_reader", *export),
            (*export, "--private", "--json"),
            ("train", "run.yaml", *LOCAL, "checkpoint.resume_from=hf:owner/new", "name=pushed"),
            ("train", "run.yaml", *LOCAL, f"checkpoint.resume_from={tmp_path / 'out'}", "name=out"),
            ("generate", "hf:owner/new", *sampled),
            ("generate", "nxdt_experiments/exported", *sampled),
            ("checkpoint", "import", "hf:owner/new", str(tmp_path / "imported")),
            ("generate", str(tmp_path / "imported"), *sampled),
        ],
        variables,
        root,
        WRITER,
    )
    assert (refused, "[NXDT-H005] hf:owner/new: the hub refuses this token" in text) == (2, True), text
    commit = server.repositories["model", "owner/new"].refs["main"]
    assert (status, json.loads(said[said.index("{") :])["pushed"]) == (0, f"hf:owner/new@{commit}"), said
    assert server.repositories["model", "owner/new"].private
    assert server.repositories["model", "owner/new"].commits[commit] == content(tmp_path / "out")
    assert [status for status, _ in others] == 6 * [0], others
    assert losses(root / "nxdt_experiments" / "pushed") == losses(root / "nxdt_experiments" / "out")
    texts = [text.splitlines()[-1] for _, text in (others[2], others[3], others[5])]
    assert len(set(texts)) == 1
    imported = json.loads((tmp_path / "imported" / "step-00000000" / "manifest.json").read_text())
    assert imported["config"]["data"]["tokenizer"]["model"] == f"hf:owner/new@main@{commit}"


def test_a_checkpoint_without_its_base_finds_it_in_the_cache_by_its_commit(published, tmp_path):
    root, server = published
    variables = server.environment(tmp_path / "cache")
    server.commit("model", "owner/base", content(root / "model"))
    adapted = ("adapter={name: lora, base_dtype: int8}", "checkpoint.resume_from=hf:owner/base", "name=adapted")
    ((status, text), _) = run_commands([("train", "run.yaml", *LOCAL, *adapted)], variables, root)
    assert status == 0, text
    server.commit("model", "owner/base", content(root / "moved"))
    run = ("generate", "nxdt_experiments/adapted", "x", "--max-new-tokens=4")
    (status, text), (_, base), _ = run_commands(
        [run, (*run, "--base", "model")], {**variables, "HF_HUB_OFFLINE": "1"}, root
    )
    assert (status, text.splitlines()[-1]) == (0, base.splitlines()[-1])


def test_the_processes_of_a_host_download_a_file_once(published, tmp_path):
    root, server = published
    server.commit("model", "owner/shared", content(root / "model"))
    asked = len(server.read)
    program = "from nxdt_core.config import hub; hub.complete(hub.local_path('hf:owner/shared'))"
    variables = {**os.environ, **server.environment(tmp_path / "cache")}
    ranks = [
        processes.Popen([sys.executable, "-c", program], env={**variables, "LOCAL_RANK": str(rank)})
        for rank in range(4)
    ]
    assert [rank.wait() for rank in ranks] == 4 * [0]
    read = server.read[asked:]
    assert sorted(read) == sorted(content(root / "model"))


def test_a_download_continues_where_it_broke_and_a_repeated_command_with_the_missing_files(published, tmp_path):
    _, server = published
    large = os.urandom(24 << 20)
    server.commit("model", "owner/large", {"config.json": b"{}", "a.safetensors": b"a", "b.safetensors": large})
    server.breaks = {"b.safetensors": [12 << 20, *5 * [0], 12 << 20]}
    program = "from nxdt_core.config import hub; p = hub.local_path('hf:owner/large'); hub.complete(p); print(p)"
    variables = {**os.environ, **server.environment(tmp_path / "cache")}
    began = len(server.read), len(server.requests)
    first, second = (
        processes.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
        for _ in range(2)
    )
    assert "[NXDT-H010] hf:owner/large: the exchange with" in first.stderr
    assert "Repeat the command: it downloads the files that are not complete yet." in first.stderr
    assert second.returncode == 0, second.stderr
    assert server.read[began[0] :] == ["config.json", "a.safetensors", "b.safetensors"]
    ranges = [ranged for method, path, ranged in server.requests[began[1] :] if "/storage/" in path and ranged]
    assert ranges == 6 * [f"bytes={10 << 20}-"], "the library writes 10 MiB at a time"
    assert (Path(second.stdout.strip()) / "b.safetensors").read_bytes() == large


@pytest.mark.slow
def test_ranks_of_torchrun_train_as_one_process_does(published, tmp_path):
    root, server = published
    asked = len(server.read)
    variables = {**os.environ, **server.environment(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nxdt_core")
    words = ("train", "run.yaml", "trainer.devices=2", "name=ranks", "checkpoint.resume_from=hf:owner/small")
    done = processes.run(
        [sys.executable, *launch, *words], env=variables, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("checkpoint.resume_from gives") == 1
    read = server.read[asked:]
    assert len(read) == len(set(read))
