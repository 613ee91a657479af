"""The shipped conversations are what their note says, and the tokenizer is made of them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from nxdt_core.data.chat.templates import shipped_template

PACKAGE = Path(str(files("nxdt_plugin_sft_chat")))


def test_the_note_counts_right(shipped):
    note = (PACKAGE / "data" / "README.md").read_text()
    answers = [sum(message["role"] == "assistant" for message in record["messages"]) for record in shipped]
    assert f"{len(shipped)} short English conversations" in note
    assert f"{sum(count > 1 for count in answers)} have several" in note
    assert f"{sum(record['messages'][0]['role'] == 'system' for record in shipped)} a system message" in note
    assert f"{sum('tools' in record for record in shipped)} call functions" in note
    assert "Apache-2.0" in note


def test_the_tokenizer_can_be_made_again(shipped):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [message["content"] for record in shipped for message in record["messages"] if message.get("content")]
    bpe.train_from_iterator(texts, trainer)
    kept = json.loads((PACKAGE / "data" / "tokenizer" / "tokenizer.json").read_text())
    assert json.loads(bpe.to_str())["model"]["vocab"] == kept["model"]["vocab"]


def test_its_template_is_the_one_that_has_a_name():
    own = (PACKAGE / "data" / "tokenizer" / "chat_template.jinja").read_text()
    assert own == shipped_template("chatml").text
