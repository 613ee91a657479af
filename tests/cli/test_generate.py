"""``nxdt generate`` of files of prompts and of every kind of address, and ``nxdt chat`` on a pipe and a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.protocols.parallel_model import CacheUnsupported
from nxdt_core.run.training import train
from nxdt_core.train.generate import load_model
from tests.train.small import SMALL

FEW = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of chats, two steps long."""
    where = tmp_path_factory.mktemp("run")
    words = (
        *SMALL,
        f"exp_manager.exp_dir={where}",
        "name=run",
        "data.seq_length=512",
        "trainer.max_steps=2",
    )
    train(load("recipe:llama-tiny-sft", [*words, "data.global_batch_size=2", "data.micro_batch_size=1"]))
    return where / "run"


def completion(capsys, *words):
    assert main(["generate", *map(str, words), "--json", *FEW]) == 0
    return json.loads(capsys.readouterr().out)["completion"]


def test_every_address_of_a_model_writes_the_same(run, capsys, tmp_path):
    assert main(["checkpoint", "export", str(run / "checkpoints"), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    places = (run, run / "checkpoints", run / "step-2", run / "checkpoints/step-00000002", tmp_path / "hf")
    found = [completion(capsys, place, "Hello") for place in places]
    assert found[0]
    assert found == [found[0]] * 5


def test_records_come_back_with_completions_in_their_order(run, capsys, tmp_path):
    records = [
        {"prompt": "Hello", "id": 7},
        {"messages": [{"role": "user", "content": "What is it?"}]},
        {"prompt": [{"role": "user", "content": "What is it?"}], "solution": "it"},
        {"prompt": "A"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert main(["generate", str(run), "--prompts", str(tmp_path / "prompts.jsonl"), "--batch-size", "2", *FEW]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{key: value for key, value in each.items() if key != "completion"} for each in found] == records
    assert found[0]["completion"] == completion(capsys, run, "Hello")
    assert found[1]["completion"] == found[2]["completion"] == completion(capsys, run, "What is it?", "--chat")


def test_lines_of_text_and_several_samples(run, capsys, tmp_path):
    first = "Hel\u2028lo\x0cthere\x85and\x0bso\x1con"  # characters at which str.splitlines cuts, too
    (tmp_path / "prompts.txt").write_text(f"{first}\r\n\nA\nA\n", encoding="utf-8", newline="")
    words = ("--prompts", str(tmp_path / "prompts.txt"), "--samples", "3", "--temperature", "1", *FEW)
    assert main(["generate", str(run), *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    assert [each["prompt"] for each in found] == [first, "A", "A"]
    assert all(len({*each["completions"]}) > 1 for each in found)
    assert found[1]["completions"] != found[2]["completions"]


@pytest.mark.parametrize(
    ("record", "said"), [({"prompt": 3}, "NXDT-E011"), ({"text": "a"}, ":1 has neither a 'prompt'")]
)
def test_a_record_without_a_prompt_is_named_before_a_model_is_loaded(record, said, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record))
    assert main(["generate", "nowhere", "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", "\n\r\n"), ("a.jsonl", "")])
def test_a_file_without_prompts_is_an_error_before_a_model_is_loaded(capsys, tmp_path, name, content):
    (tmp_path / name).write_text(content, newline="")
    assert main(["generate", "nowhere", "--prompts", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name} holds no " in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_file_of_prompts_that_is_not_there_is_named_with_what_lies_nearby(capsys, tmp_path, ending):
    (tmp_path / f"prompts.{ending}").write_text("A")
    assert main(["generate", "nowhere", "--prompts", str(tmp_path / f"prompt.{ending}")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"--prompts: no file is found at '{tmp_path}/prompt.{ending}'; found nearby: '{tmp_path}/prompts" in said


@pytest.mark.parametrize("words", [(), ("a", "--prompts", "b.txt"), ("a", "--top-p", "0"), ("a", "--min-p", "1.5")])
def test_options_that_cannot_be_are_refused(words, capsys):
    assert main(["generate", "nowhere", *words]) == 2
    assert "Error:" in capsys.readouterr().err


class Counts:
    """A model that answers with the number of question marks that it sees, and ends."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def forward(self, ids):
        seen = ids[0].tolist()
        marks = self.tokenizer.decode(seen).count("?")
        (answer,) = self.tokenizer.encode(str(marks))
        token = self.tokenizer.eos_id if seen[-1] == answer else answer
        return torch.nn.functional.one_hot(torch.tensor([[token]]), self.tokenizer.vocab_size).float()

    writing = contextlib.nullcontext

    def decoding(self, lengths, columns):
        raise CacheUnsupported("it keeps none")


def test_a_chat_keeps_its_turns_forgets_them_on_reset_and_ends(run, capsys, monkeypatch):
    loaded = load_model(str(run))
    counting = dataclasses.replace(loaded, model=Counts(loaded.tokenizer))
    monkeypatch.setattr("nxdt_core.train.generate.load_model", lambda *_, **__: counting)
    typed = "One?\nTwo?\n\n/reset\nThree?\n/what now\n/exit\nnever?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", "here", "--system", "Why?"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == ["2", "3", "2"]
    assert "/what is not a command" in shown.err


@pytest.mark.slow  # starts a process on a terminal
def test_an_interrupt_ends_an_answer_and_not_the_session(run):
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "nxdt_core", "chat", str(run)]
    words = ("--max-new-tokens", "100000", "--temperature", "5")
    process = subprocess.Popen([*command, *words], stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown = bytearray()

    def read():
        with contextlib.suppress(OSError):  # Linux says so when the last writer has gone
            while part := os.read(ours, 4096):
                shown.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def until(condition):
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, bytes(shown[-500:])
            time.sleep(0.05)

    try:
        until(lambda: shown.endswith(b"> "))
        os.write(ours, b"Hello\n")
        until(lambda: len(shown) > 200)  # it writes
        os.killpg(process.pid, signal.SIGINT)
        until(lambda: shown.endswith(b"\n> "))
        before = len(shown)
        time.sleep(1)  # a signal between readline's prompt and its wait is seen with the next key
        os.killpg(process.pid, signal.SIGINT)  # at the prompt
        until(lambda: len(shown) > before and shown.endswith(b"> "))
        os.write(ours, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(60)
        os.close(ours)
