"""The shipped tokenizer and conversations, and loaders over records that a test writes."""

from __future__ import annotations

import json
from datetime import date
from importlib.resources import files
from pathlib import Path

import pytest
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.loader import ChatData
from nxdt_plugin_sft_chat.rendering import Renderer

from nxdt_core.data.chat.records import read_record
from nxdt_core.data.chat.rendering import TemplateRunner
from nxdt_core.data.chat.templates import ChatTemplate
from nxdt_core.data.files.records import Place
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from nxdt_core.protocols.dataset import DataContext

DATA = Path(str(files("nxdt_plugin_sft_chat") / "data"))
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
}
CALL = {
    "tools": [{"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {}}}],
    "messages": [
        {"role": "user", "content": "How late is it?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]},
        {"role": "tool", "content": "12:30"},
        {"role": "assistant", "content": "Half past twelve."},
    ],
}


@pytest.fixture(scope="session")
def tokenizer():
    return HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=DATA / "tokenizer"))


@pytest.fixture(scope="session")
def chats_file():
    return DATA / "chats.jsonl"


@pytest.fixture(scope="session")
def shipped(chats_file):
    """The records of the shipped conversations."""
    return [json.loads(line) for line in chats_file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def talk():
    """A conversation of two turns with a system message."""
    return TALK


@pytest.fixture(scope="session")
def call():
    """A conversation with a call of a function."""
    return CALL


@pytest.fixture
def write(tmp_path):
    """Write records as JSONL; returns the path."""

    def write(*records, name="chats.jsonl"):
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(tokenizer):
    """``load(path, packing=True)`` is the training split; ``seq_length`` and ``seed`` are those of the run."""

    def load(path, split="train", *, seq_length=256, seed=1, tokenizer=tokenizer, **keys):
        context = DataContext(seq_length=seq_length, seed=seed, tokenizer=tokenizer)
        return ChatData(ChatConfig(train_files=(path,), **keys), context).split(split)

    return load


@pytest.fixture(scope="session")
def render():
    """``render(template text, record)`` is the text, and what of it each trained message is; with ``learnt``, what of
    it the loss is on."""

    def render(template, record, trained=None, bos="<s>", eos="</s>", learnt=False, **options):
        conversation = read_record(record, Place(path="a.jsonl", number=7))
        spoken = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
        tokens = {"bos_token": bos, "eos_token": eos}
        runner = TemplateRunner(ChatTemplate(template, "given"), tokens, options, date(2024, 7, 26))
        found = Renderer(runner).render(conversation, spoken if trained is None else trained)
        if learnt:
            return [found.text[start:end] for start, end in found.learnt]
        return found.text, [found.text[start:end] for start, end in found.trained.values()]

    return render
