"""Data files that become shorter or longer, or vanish, while a run reads them, and between two runs: real processes.

A run names the file and ends with status 2, or it continues where nothing that it reads has changed. It never dies of
SIGBUS, and never resumes with other data.
"""

from __future__ import annotations

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from nxdt_plugin_megatron_data.indexed_files import write_documents

from tests.launch.launching import finish, start
from tests.sampling import sampled

CHANGES = """
import os
from nxdt_core.api import Callback, Component, hookimpl

class Changes(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.rank != 0 or run.step != 3:
            return
        path, how = os.environ["CHANGED"], os.environ["HOW"]
        if how == "shrink":
            os.truncate(path, os.path.getsize(path) // 3)
        elif how == "empty":
            os.truncate(path, 0)
        elif how == "grow":
            with open(path, "ab") as file:
                file.write(open(path, "rb").read())
        elif how == "vanish":
            os.unlink(path)

@hookimpl
def nxdt_callbacks():
    return [Component(name="changes", target="changes:Changes", summary="Changes a data file in a run.")]
"""

STEPS = 12
RUN = {
    "name": "run",
    "seed": 1,
    "trainer": {"max_steps": STEPS, "accelerator": "cpu", "log_every_n_steps": 1},
    "exp_manager": {},
    "checkpoint": {"every_n_train_steps": 2, "resume_if_exists": True, "resume_ignore_no_checkpoint": True},
    "model": {
        "name": "llama", "vocab_size": 1024, "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64,
        "num_attention_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 32,
        "optim": {"name": "adamw", "lr": 1e-3},
    },
    "precision": {"type": "fp32"},
}  # fmt: skip
DATA = {"seq_length": 32, "micro_batch_size": 4, "global_batch_size": 8, "tokenizer": {"library": "byte"}}
ROWS = [np.random.default_rng(number).integers(0, 256, 40).tolist() for number in range(400)]
WORDS = ["".join(map(chr, (97 + np.array(row) % 26).tolist())) for row in ROWS]


def megatron(directory, name):
    write_documents(directory / "corpus", np.dtype("<u2"), ([np.array(row)] for row in ROWS * 20))
    return directory / name, {"name": "megatron-data", "data_prefix": str(directory / "corpus")}


def text(directory, name):
    path = directory / name
    path.write_text("\n".join(WORDS))
    return path, {"name": "text", "train_files": [str(path)]}


def chats(directory, name):
    path = directory / name
    said = [[{"role": "user", "content": word[:8]}, {"role": "assistant", "content": word[8:16]}] for word in WORDS]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in said))
    tokenizer = {"library": "huggingface", "model": "package://nxdt_plugin_sft_chat/data/tokenizer"}
    return path, {"name": "sft-chat", "train_files": [str(path)], "tokenizer": tokenizer}


def stream(directory, name):
    path, rows = directory / name, ROWS[:50]  # so few that the run reads the file a second time
    table = pa.table({"input_ids": rows})
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=20)
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    return path, {"name": "hf-data", "train_dir": str(path), "streaming": True, "shuffle_block": 4, "packing": True}


def saved(directory, name):
    datasets.Dataset.from_dict({"input_ids": ROWS * 40}).save_to_disk(directory / name)
    return next((directory / name).glob("*.arrow")), {
        "name": "hf-data",
        "train_dir": str(directory / name),
        "packing": True,
    }


MAKERS = {
    "corpus.bin": megatron,
    "corpus.idx": megatron,
    "saved": saved,
    "rows.arrow": stream,
    "rows.parquet": stream,
    "rows.jsonl": stream,
    "a.txt": text,
    "a.jsonl": chats,
}
IN_MEMORY = ("a.txt", "a.jsonl")
"""Files that a run reads whole at its start."""


@pytest.fixture
def run(tmp_path):
    """``run(data)`` trains a tiny model; returns the exit status and what it said. Keywords are variables."""

    def trained(data, devices=1, steps=STEPS, **variables):
        (tmp_path / "changes.py").write_text(CHANGES)
        config = {**RUN, "data": {**DATA, **data}}
        config["exp_manager"] = {**RUN["exp_manager"], "exp_dir": str(tmp_path)}
        config["trainer"] = {**RUN["trainer"], "devices": devices, "max_steps": steps}
        if variables:
            config["plugins"] = {"local": [str(tmp_path / "changes.py")]}
            config["trainer"]["callbacks"] = ["changes"]
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        status, out, err = finish(start([str(path)], PYTHONPATH=str(tmp_path), **variables))
        return status, out + err

    return trained


def cases():
    for name in MAKERS:
        for how in ("shrink", "empty", "grow", "vanish"):
            for devices in (1, 2):
                yield name, how, devices


def pytest_generate_tests(metafunc):
    if "how" in metafunc.fixturenames:
        deadly = [("corpus.bin", "empty", 1), ("saved", "empty", 1)]  # SIGBUS, while all files were mapped
        rest = [case for case in cases() if case not in deadly]
        metafunc.parametrize(("name", "how", "devices"), [*deadly, *sampled(metafunc.config, rest, 0, of="data")])
    elif "changed" in metafunc.fixturenames:
        metafunc.parametrize(
            "changed", ["a.txt", *sampled(metafunc.config, [name for name in MAKERS if name != "a.txt"], 0)]
        )


def test_a_file_that_changes_while_a_run_reads_it_ends_the_run_with_its_name(run, tmp_path, name, how, devices):
    path, data = MAKERS[name](tmp_path, name)
    before = path.read_bytes()
    status, said = run(data, devices, CHANGED=str(path), HOW=how)
    assert "Traceback" not in said
    changed = how in ("shrink", "empty") or (how == "grow" and name.startswith("rows.") and "parquet" not in name)
    if name in IN_MEMORY or (not changed and status == 0):
        assert status == 0, said
        return
    assert status == 2, said
    assert "[NXDT-D" in said
    assert path.name in said
    path.write_bytes(before)
    saved_steps = (int(found.parent.name[5:]) for found in tmp_path.glob("run/checkpoints/step-*/manifest.json"))
    status, said = run(data, devices, steps=max(saved_steps) + 2)
    assert status == 0, said
    assert "resuming from" in said


def test_a_run_does_not_resume_with_other_data(run, tmp_path, changed):
    path, data = MAKERS[changed](tmp_path, changed)
    assert run(data)[0] == 0
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    kept = sorted(found.name for found in newest.rglob("*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    status, said = run(data, steps=STEPS + 4)
    assert status == 2, said
    assert "[NXDT-D" in said
    assert "Traceback" not in said
    assert sorted(found.name for found in newest.rglob("*")) == kept
