"""Text of data, files and checkpoints does not reach a terminal or a log as it is."""

from __future__ import annotations

import json
import logging
import re

import click
import pytest

from nxdt_core.errors.checkpoints import BadStorageUri
from nxdt_core.system.visible_text import visible

CLIPBOARD = "\x1b]52;c;Y3VybCBldmlsIHwgc2g=\x07"
CLEAR = "\x1b[2J\x1b[H"
TURNED = "\u202etxt.exe\u2066"
HOSTILE = f"a{CLIPBOARD}b{CLEAR}c{TURNED}d\x9b31me\x7f"


def raw_controls(text):
    """Control characters that a terminal would obey, apart from colours and line ends."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [char for char in plain if visible(char) != char and char != "\r"]


def test_controls_become_escapes_and_letters_stay():
    shown = visible(HOSTILE)
    assert raw_controls(shown) == []
    assert shown.startswith(r"a\u001b]52;c;Y3VybCBldmlsIHwgc2g=\u0007b\u001b[2J")
    assert json.loads(f'"{shown}"') == HOSTILE
    for text in ("naïve\tLlama\n", "שלום", "مرحبا", "नमस्ते", "👩‍👩‍👧", "日本語", "Ω≈ç√∫"):
        assert visible(text) == text


def test_own_colours_stay_where_they_are_wanted():
    assert visible("\x1b[32mok\x1b[0m\x1b[2J", colours=True) == "\x1b[32mok\x1b[0m\\u001b[2J"


def test_errors_show_what_was_found_without_obeying_it():
    assert raw_controls(str(BadStorageUri(where=HOSTILE, reason=HOSTILE))) == []


@pytest.mark.parametrize("ids", [(), ("--ids",)])
def test_a_preview_of_hostile_records(nxdt, nxdt_on_terminal, tmp_path, ids):
    record = {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]}
    record["messages"][0][f"key{CLIPBOARD}"] = "unused"
    (tmp_path / "chats.jsonl").write_text((json.dumps(record) + "\n") * 20)
    words = ("data", "preview", "recipe:llama-tiny-sft", f"data.train_files=[{tmp_path}/chats.jsonl]", "-n", "1", *ids)
    words = (*words, "data.packing=false")
    status, shown = nxdt_on_terminal(*words)
    assert status == 0, shown
    assert r"\u001b]52;c;" in shown or ids
    assert raw_controls(shown) == []
    for done in (nxdt(*words), nxdt(*words, "--json")):
        assert done.returncode == 0, done.stderr
        assert raw_controls(done.stdout + done.stderr) == []


def test_facts_of_a_hostile_checkpoint(nxdt, nxdt_on_terminal, tmp_path):
    import torch

    from nxdt_core.checkpoint import CheckpointFacts, open_storage
    from tests.checkpoint.saving import save_checkpoint

    facts = CheckpointFacts(
        config={f"name{HOSTILE}": HOSTILE},
        metrics={f"loss{HOSTILE}": 1.0},
        versions={f"torch{HOSTILE}": HOSTILE},
        mesh={f"tp{HOSTILE}": 1},
        plugin_fingerprint=HOSTILE,
    )
    uri = str(tmp_path / "store")
    save_checkpoint(
        open_storage(uri), step=1, model={f"w{HOSTILE}": torch.ones(2)}, optimizer={}, state={}, facts=facts
    )
    for verb in (("list",), ("inspect",), ("inspect", "--saved-config"), ("inspect", "--tensors"), ("verify",)):
        status, shown = nxdt_on_terminal("checkpoint", *verb, uri)
        assert (status, raw_controls(shown)) == (0, []), verb
        done = nxdt("checkpoint", *verb, uri)
        assert (done.returncode, raw_controls(done.stdout + done.stderr)) == (0, []), verb


def test_the_log_of_a_run(tmp_path, small_log):
    logging.getLogger("nxdt_core.some").warning("found %s", HOSTILE)
    (text,) = (path.read_text() for path in small_log.glob("*rank-0*.txt"))
    assert "found a" in text
    assert raw_controls(text) == []


@pytest.fixture
def small_log(tmp_path):
    from nxdt_core.config import load
    from nxdt_core.protocols.engine import RankInfo
    from nxdt_core.run.log import run_log

    config = load("recipe:llama-tiny", [f"exp_manager.exp_dir={tmp_path}", "name=run"])
    with run_log(config, RankInfo(rank=0, world_size=1, local_rank=0)):
        yield config.run_dir / "logs"


def test_a_run_whose_addresses_are_hostile(nxdt_on_terminal, tmp_path):
    where = tmp_path / f"{CLEAR}{TURNED}"
    where.mkdir()
    (where / "run.yaml").write_text("base: recipe:llama-tiny\n")
    status, shown = nxdt_on_terminal("config", "check", str(where / "run.yaml"))
    assert status == 0, shown
    assert raw_controls(shown) == []
    keys = ("trainer.max_steps=1", "trainer.accelerator=cpu", f"checkpoint.uri={json.dumps(str(where / 'saved'))}")
    status, shown = nxdt_on_terminal("train", "recipe:llama-tiny", *keys, f"exp_manager.exp_dir={tmp_path}")
    assert status == 0, shown
    assert "checkpoint: " in click.unstyle(shown)
    assert raw_controls(shown) == []


def test_what_a_model_says_is_escaped_on_a_terminal_and_unchanged_in_a_pipe(nxdt, nxdt_on_terminal, tmp_path):
    """An untrained model of bytes says anything."""
    from nxdt_core.train import TrainSession

    few = ("model.num_layers=1", "data.seq_length=128", f"checkpoint.uri={tmp_path}/saved")
    with TrainSession.load("recipe:llama-tiny", few) as session:
        session.save()
    words = ("generate", f"{tmp_path}/saved", "In", "--max-new-tokens", "60", "--temperature", "9")
    status, shown = nxdt_on_terminal(*words)
    assert (status, raw_controls(shown)) == (0, [])
    done = nxdt(*words)
    assert done.returncode == 0, done.stderr
    assert raw_controls(done.stdout) != []
    assert visible(done.stdout).split() == shown.split()
