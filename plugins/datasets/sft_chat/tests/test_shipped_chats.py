"""The shipped conversations are what their note says, and the tokenizer is made of them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from nxdt_core.data.chat.templates import shipped_template

PACKAGE = Path(str(files("nxdt_plugin_sft_chat")))
LIBRARY = PACKAGE / "data" / "library.jsonl"
FACTS = (
    *("9:30 am|6:30 pm", "Monday", "10 am|3 pm", "14 Ferry Lane", "555-0142", "free|£9", "photo ID|letter", "14 items"),
    *("24 days", "5 days", "twice", "15p", "no|fees", "£3", "Odile Marsh", "Tomas Brill", "Thursday|2 pm"),
    *("Heron Room", "Lantern Room", "bluekettle", "8p", "free", "Saturday|10:30 am", "last Wednesday|7 pm"),
    *("Friday|4 pm", "Inkwell", "Thursday", "green hatch", "90 minutes", "ine 7", "Pelican", "four packets", "1887"),
    *("two days", "ukulele", "second Saturday in June", "6 days", "Comma", "Leafcase", "£18"),
)
"""What the last answers of five conversations in a row have in common, in the order of the file."""
AMOUNTS = {"£3", "£6", "£9", "£18", "9:30 am", "10 am", "10:30 am", "2 pm", "3 pm", "4 pm", "6:30 pm", "7 pm"}


@pytest.fixture(scope="module")
def library():
    """Messages of the conversations of the help desk."""
    return [json.loads(line)["messages"] for line in LIBRARY.read_text(encoding="utf-8").splitlines()]


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


def test_each_fact_of_the_help_desk_has_five_conversations_that_agree(library):
    assert len(library) == 5 * len(FACTS) == 200
    for number, messages in enumerate(library):
        for part in FACTS[number // 5].split("|"):
            assert part in messages[-1]["content"], messages
    answers = " ".join(message["content"] for messages in library for message in messages if message["role"] != "user")
    assert set(re.findall(r"£\d+|\d+(?::\d+)? [ap]m", answers)) == AMOUNTS


def test_no_question_to_the_help_desk_occurs_twice(library):
    asked = [tuple(each["content"].lower() for each in messages if each["role"] == "user") for messages in library]
    assert len(set(asked)) == len(asked)
    assert sum(len(questions) == 2 for questions in asked) == len(FACTS), "one refers back"


def test_the_help_desk_s_conversations_are_short_samples(load):
    dataset = load(LIBRARY, seq_length=128)
    assert len(dataset) == 200
    assert all((dataset[number].labels >= 0).any() for number in range(0, 200, 20))


def test_the_note_counts_the_help_desk_s_conversations(library):
    note = (PACKAGE / "data" / "README.md").read_text()
    assert f"{len(library)} conversations with the help desk" in note
    assert f"{len(FACTS)} facts" in note
