"""Each record on the page of dataset formats is read by the parser of the plugin that the page names."""

import json
import re
from pathlib import Path

import pytest

from nxdt_core.data.chat.records import read_record
from nxdt_core.data.files.paths import read_bytes
from nxdt_core.data.files.records import read_records

PAGE = (Path(__file__).parents[2] / "docs/reference/dataset-formats.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
RECORDS = {title: re.findall(r"```(?:json|text)\n(.*?)```", body, re.DOTALL) for title, body in SECTIONS.items()}


def texts(path):
    documents = pytest.importorskip("nxdt_plugin_text.loader").documents
    return [text for text, _ in documents(path, read_bytes(path), text_key="text", separator=None)]


def rows(path):
    batches = pytest.importorskip("nxdt_plugin_hf_data.formats").read_rows(path, "text")
    return [row for _, batch in batches for row in batch.to_pylist()]


def test_every_section_has_a_record_keys_and_a_command():
    lacking = [title for title, body in SECTIONS.items() if not RECORDS[title]]
    assert lacking == []
    assert len(RECORDS) == 11
    for body in SECTIONS.values():
        own = "```yaml\ndata:" in body and "\nnxdt data preview " in body
        assert own or re.search(r"command\s+are\s+those\s+of", body)


def test_a_plain_text_is_one_document(tmp_path):
    (text,) = RECORDS["Plain text"]
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text]


def test_texts_in_jsonl_are_read_by_three_plugins(tmp_path):
    preprocess = pytest.importorskip("nxdt_plugin_megatron_data.encoding")
    tokenizers = pytest.importorskip("nxdt_plugin_megatron_data.encoding")
    (line,), (other,) = RECORDS["JSONL of texts"], RECORDS["Megatron files"]
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    text = json.loads(line)["text"]
    assert texts(file) == [text]
    assert rows(file) == [{"text": text}]
    recipe = preprocess.TokenizationOptions(text_key="text", separator=None, append_eod=False)
    encoder = preprocess.RecordEncoder(tokenizers.find_tokenizer("byte").build(), recipe)
    encoded = encoder.encode(other.encode(), json_lines=True)
    assert (encoded.records, encoded.faults) == (1, [])
    assert encoded.lengths.tolist() == [len(json.loads(other)["text"])]


def test_rows_of_tokens_keep_their_three_columns(tmp_path):
    (line,) = RECORDS["Rows of tokens"]
    (tmp_path / "a.jsonl").write_text(line)
    assert rows(tmp_path / "a.jsonl") == [json.loads(line)]


@pytest.mark.parametrize("title", ["OpenAI messages", "ShareGPT", "Alpaca", "Text pairs"])
def test_every_field_of_a_conversation_is_read(title, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(RECORDS[title]))
    for place, record in read_records([file], "train_files")[0]:
        conversation = read_record(record, place)
        assert conversation.unused == ()
        assert conversation.messages[-1].role == "assistant"
        assert bool(conversation.tools) == ("tools" in record)


@pytest.mark.parametrize("title", ["Preference pairs of texts", "Preference pairs of messages"])
def test_every_field_of_a_pair_is_read(title, tmp_path):
    read_preference = pytest.importorskip("nxdt_plugin_preference.rendering").read_preference
    file = tmp_path / "a.jsonl"
    file.write_text("".join(RECORDS[title]))
    for place, record in read_records([file], "train_files")[0]:
        pair = read_preference(record, place)
        assert pair.unused == ()
        assert pair.prompt
        assert isinstance(pair.answers["chosen"], tuple) == ("messages" in title)


def test_every_field_of_an_answer_with_a_label_is_read(tmp_path):
    read_unpaired = pytest.importorskip("nxdt_plugin_preference.rendering").read_unpaired
    file = tmp_path / "a.jsonl"
    file.write_text("".join(RECORDS["Answers with labels"]))
    for place, record in read_records([file], "train_files")[0]:
        found = read_unpaired(record, place)
        assert (found.unused, found.scores, found.answers) == ((), (1.0,), {"completion": "4"})
