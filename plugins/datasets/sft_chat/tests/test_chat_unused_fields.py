"""Every field of a record is used, refused, or counted and reported."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import redirect_stderr, redirect_stdout

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.cli import main
from nxdt_core.data.chat.records import read_record
from nxdt_core.data.files.records import Place
from nxdt_core.errors.chats import BadMessage, FieldsUnused

USER, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}
TALK = {"messages": [USER, ANSWER]}
TOOL = {"name": "clock", "description": "The time of a zone.", "parameters": {}}
CALL = {"name": "clock", "arguments": '{"zone": "UTC"}'}
ANSWERS_ALONE = """{% for message in messages if message.role in ('user', 'assistant') %}
{{- message.role }}: {% if message.role == 'assistant' %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls %}{{ call.function.name }}{% endfor %}{{ eos_token }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{% endfor %}"""
"""A template without a place for system messages, tools, results, reasoning and arguments."""
REASONS = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- if message.reasoning_content %} ({{ message.reasoning_content }}){% endif %}{{ eos_token }}
{% endfor %}"""


def read(record):
    return read_record(record, Place(path="a.jsonl", number=7))


@pytest.fixture
def counted(load, write, tmp_path):
    """``counted(template, *records)``: what the report says is unused."""

    def counted(template, *records, **keys):
        if template is not None:
            keys["chat_template_file"] = tmp_path / "template.jinja"
            keys["chat_template_file"].write_text(template)
        return load(write(*records), **keys).report().unused

    return counted


DROPS_THOUGHTS = """{% for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1] }}
{{- eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
KEEPS_LAST = DROPS_THOUGHTS.replace("[-1]", "[-1] if not loop.last else message.content")


@pytest.mark.parametrize(
    ("template", "contents", "unused"),
    [
        (DROPS_THOUGHTS, ["<think>\nHm.\n</think>\n\nHere."], {"reasoning in content": 1}),
        (DROPS_THOUGHTS, ["Hm.\n</think>\n\nHere."], {"reasoning in content": 1}),
        (DROPS_THOUGHTS, ["<think>\n\n</think>\n\nHere.", "Here."], {}),
        (KEEPS_LAST, ["<think>a</think>Here.", "<think>b</think>Here."], {}),
        (KEEPS_LAST, ["<think>a</think>Here.", "Here."], {"reasoning in content": 1}),
    ],
)
def test_reasoning_in_a_text_that_the_template_drops_is_counted(counted, template, contents, unused):
    turns = [turn for text in contents for turn in (USER, {**ANSWER, "content": text})]
    assert counted(template, {"messages": turns}) == unused


def test_the_history_of_alpaca_comes_before_the_instruction():
    record = {"instruction": "C", "input": "D", "output": "E", "system": "S", "history": [["q", "a"], ["r", "b"]]}
    found = read(record)
    assert [message.content for message in found.messages] == ["S", "q", "a", "r", "b", "C\n\nD", "E"]
    assert [message.role for message in found.messages] == ["system", *("user", "assistant") * 3]
    assert found.unused == ()


@pytest.mark.parametrize("empty", [[], "", None])
def test_an_empty_history_is_none(empty):
    found = read({"instruction": "C", "output": "E", "history": empty, "system": "", "tools": "[]"})
    assert (len(found.messages), found.tools, found.unused) == (2, None, ())


@pytest.mark.parametrize("history", ["q", [["q"]], ["qa"], [{"q": "a"}], {"q": "a"}])
def test_a_history_of_another_form_is_refused(history):
    with raises(BadMessage, match=r"a\.jsonl:7: 'history' must be a list of \[question, answer\] pairs"):
        read({"instruction": "C", "output": "E", "history": history})


@pytest.mark.parametrize(
    ("record", "unused"),
    [
        ({**TALK, "conversations": [{"from": "human", "value": "x"}]}, ("conversations",)),
        ({**TALK, "history": [["a", "b"]], "instruction": "x", "prompt": "y"}, ("history", "instruction", "prompt")),
        ({**TALK, "system": "S", "id": 0, "source": "web", "images": []}, ("id", "source")),
        ({"messages": [{"role": "system", "content": "one"}, USER, ANSWER], "system": "other"}, ("system",)),
        ({"messages": [{"role": "system", "content": "one"}, USER, ANSWER], "system": "one "}, ()),
        ({"input": "u", "output": "a", "chosen": "x", "label": True}, ("chosen", "label")),
        ({**TALK, "tools": [TOOL], "functions": [TOOL]}, ("functions",)),
        ({**TALK, "functions": [TOOL]}, ()),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "Where?", "cache": 1}]}, ANSWER]},
            ("messages.content.cache",),
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": "1", "strict": True}]}]},
            ("messages.tool_calls.strict",),
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL], "function_call": CALL}]},
            ("messages.function_call",),
        ),
    ],
)
def test_keys_that_a_form_does_not_read_are_named(record, unused):
    assert read(record).unused == unused


def test_openais_older_calls_are_read():
    asked = {"role": "assistant", "content": None, "function_call": CALL}
    found = read({"messages": [USER, asked, {"role": "function", "name": "clock", "content": "12"}, ANSWER]})
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].calls[0]["function"] == {"name": "clock", "arguments": {"zone": "UTC"}}
    given = read({**TALK, "functions": [TOOL]})
    assert given.tools == [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"content": "x"}, "'content' and 'value' differ"),
        ({"role": "user"}, "'role' and 'from' differ"),
        ({"from": "function_call", "tool_calls": [CALL]}, "'value' and 'tool_calls' both hold calls"),
    ],
)
def test_a_message_in_two_forms_that_differ_is_refused(more, found):
    message = {"from": "gpt", "value": "Here.", **more}
    with raises(BadMessage, match=rf"message 2: {found}"):
        read({"conversations": [{"from": "human", "value": "Where?", "role": "user"}, message]})


def test_a_system_entry_that_is_no_text_is_refused():
    with raises(BadMessage, match=r"a\.jsonl:7: its content is of type dict"):
        read({**TALK, "system": {"text": "S"}})


def test_what_a_template_ignores_is_counted(counted):
    reasoned = {"messages": [USER, {**ANSWER, "reasoning_content": "It is near.", "refusal": None, "name": "bob"}]}
    called = {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "tool_calls": [{**CALL, "id": "1"}]},
            {"role": "tool", "content": "12:30", "tool_call_id": "1"},
            ANSWER,
        ],
    }
    paired = {"input": "Where?", "output": "Here.", "system": "Be kind."}
    assert counted(ANSWERS_ALONE, reasoned, called, {**TALK, "tools": [TOOL]}, paired) == {
        "system messages": 2,
        "tools": 2,
        "messages.name": 1,
        "messages.reasoning_content": 1,
        "messages.tool_calls.arguments": 1,
        "tool messages": 1,
    }


def test_what_a_template_writes_is_not_counted(counted, call):
    reasoned = {"messages": [USER, {**ANSWER, "reasoning_content": "It is near."}], "system": "Be brief."}
    assert counted(REASONS, reasoned) == {}
    assert counted(None, call, {**TALK, "system": "Be brief."}) == {}


def test_the_shipped_conversations_have_no_unused_field(load, chats_file):
    assert load(chats_file, seq_length=512).report().unused == {}


def test_every_kind_of_file_has_the_same_counts(load, tmp_path):
    records = [{**TALK, "id": number, "source": "web" if number else None} for number in range(3)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    table = pyarrow.Table.from_pylist(records)
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "a.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    found = {path.name: load(path).report().unused for path in sorted(tmp_path.iterdir())}
    assert len(found) == 6
    assert list(found.values()) == [{"id": 3, "source": 2}] * 6


def test_the_first_record_with_an_unused_field_is_refused_where_the_configuration_says_so(load, write):
    path = write(TALK, {**TALK, "id": 1, "history": [["a", "b"]]})
    with raises(FieldsUnused, match=r"chats\.jsonl:2: .* uses 'id', 'history'\.") as caught:
        load(path, unused_fields="refuse")
    assert "data.unused_fields: report" in str(caught.value)
    assert len(load(write(TALK), unused_fields="refuse")) == 1


def said_on_rank(words, directory):
    """The exit status of ``nxdt WORDS`` on this rank, and all that it prints."""
    path = directory / f"said-{os.environ['RANK']}.txt"
    with path.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 2)
        status = main(words)
    return status, path.read_text()


@pytest.mark.slow  # its subject is how often a report is printed
def test_all_ranks_of_a_run_report_once_also_from_the_cache(write, tmp_path, capfd):
    path = write(*({**TALK, "id": number} for number in range(1204)))
    train = [
        *("train", "recipe:llama-tiny-sft"),
        *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "trainer.accelerator=cpu"),
        *(f"data.train_files=[{path}]", "data.validation_fraction=0", "data.seq_length=64", "data.packing=true"),
        *(f"exp_manager.exp_dir={tmp_path}", "data.micro_batch_size=1", "data.global_batch_size=2"),
        "trainer.limit_val_batches=0",
    ]
    report = "train data: unused: id in 1,204 records\n"
    for steps in (1, 2):
        words = [*train, "trainer.devices=2", f"trainer.max_steps={steps}"]
        found = RankPool(2).run(said_on_rank, words, tmp_path, timeout_s=300)
        assert [status for status, _ in found] == [0, 0], found
        assert sum(said.count(report) for _, said in found) == 1, found
    capfd.readouterr()
    assert main([*train, "trainer.devices=1", "trainer.max_steps=3", "data.unused_fields=refuse"]) == 2
    said = "".join(capfd.readouterr())
    assert (report in said, "[NXDT-D322]" in said) == (False, True), said
