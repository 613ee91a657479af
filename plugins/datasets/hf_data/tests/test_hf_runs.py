"""Whole runs from the command line: a mixture of streams, stopped on two processes, goes on in one."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import processes

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "data.seq_length=32",
    "data.global_batch_size=8",
    "data.num_workers=1",
    "data.val_dir=null",
    "trainer.accelerator=cpu",
    "trainer.val_check_interval=null",
    "model.optim.sched.max_steps=40",
)
HALF, WHOLE = 5, 10


def train(where, sources, steps, *more):
    """Losses by step."""
    command = [sys.executable, "-m", "nxdt_core", "train", "recipe:hf-data-tiny", *SMALL, "name=run"]
    settings = (
        f"exp_manager.exp_dir={where}",
        f"trainer.max_steps={steps}",
        "data.train_dir=null",
        f"data.sources={json.dumps(sources)}",
        "data.streaming=true",
        "data.shuffle_block=20",
    )
    done = processes.run(
        [*command, *settings, *more],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = map(json.loads, (where / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture
def sources(tmp_path, verses):
    """Two, with so little text that a run passes over one of them more than once."""
    made = {}
    for name, texts, weight in (("first", verses[:8], 1.0), ("second", verses[8:], 3.0)):
        (tmp_path / name).mkdir()
        for number in range(2):
            pq.write_table(pa.table({"text": texts[number::2]}), tmp_path / name / f"{number}.parquet")
        made[name] = {"train_dir": str(tmp_path / name), "weight": weight}
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_two_processes_goes_on_in_one_as_if_it_had_never_stopped(tmp_path, sources):
    whole = train(tmp_path / "whole", sources, WHOLE)
    first = train(tmp_path / "parts", sources, HALF, "trainer.devices=2")
    both = train(tmp_path / "parts", sources, WHOLE)
    assert sorted(first) == [*range(1, HALF + 1)]
    assert sorted(both) == sorted(whole) == [*range(1, WHOLE + 1)]
    assert all(abs(both[step] - whole[step]) < 1e-5 for step in whole)
    assert whole[WHOLE] < whole[1]
