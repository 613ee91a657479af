"""Records of every form become conversations; each way to get them wrong is named with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil

import pytest
from nxdt_testing.errors import raises

from nxdt_core.data.chat.records import read_record
from nxdt_core.data.files.paths import EXPANDS_BY, EXPANDS_TO_BYTES
from nxdt_core.data.files.records import Place, read_records
from nxdt_core.errors.chats import BadMessage, EmptyTurn, RolesOutOfOrder, UnknownRecord, UnknownRole
from nxdt_core.errors.data import (
    ArrowUnreadable,
    BadJsonFile,
    BadJsonLine,
    DataFileNotFound,
    DataFileUnreadable,
    NoRecords,
    TextNotUtf8,
)

SYSTEM = {"role": "system", "content": "s"}
USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALLS = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
RESULT = {"role": "tool", "content": "r"}


def read(record):
    return read_record(record, Place(path="a.jsonl", number=7))


def said(record):
    return [(message.role, message.content) for message in read(record).messages]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [USER, ANSWER], "messages": None},
        {"input": "u", "output": "a"},
        {"instruction": "u", "input": "", "output": "a"},
        {"instruction": "u", "output": "a"},
    ],
)
def test_the_forms_say_the_same(record):
    assert said(record) == [("user", "u"), ("assistant", "a")]


def test_an_instruction_stands_before_its_input():
    assert said({"instruction": "Add.", "input": "2+2", "output": "4"})[0] == ("user", "Add.\n\n2+2")


@pytest.mark.parametrize(
    ("more", "train"),
    [({"weight": 0}, False), ({"weight": 1}, None), ({"weight": 0, "train": True}, True), ({"train": False}, False)],
)
def test_a_weight_of_nothing_is_not_trained(more, train):
    message = read({"messages": [USER, {**ANSWER, **more}]}).messages[1]
    assert (message.train, message.fields) == (train, {})


def test_a_weight_between_nothing_and_all_is_kept():
    message = read({"messages": [USER, {**ANSWER, "weight": 0.25}]}).messages[1]
    assert (message.train, message.weight) == (None, 0.25)


@pytest.mark.parametrize(
    "record", [{"messages": [USER, {**ANSWER, "weight": 0.5}]}, {"prompt": "u", "completion": "a"}]
)
def test_a_record_s_weight_multiplies_those_of_its_messages(record):
    own = [message.weight for message in read(record).messages]
    found = read({**record, "weight": 3})
    assert [message.weight for message in found.messages] == [3 * weight for weight in own]
    assert found.unused == ()
    assert {message.train for message in read({**record, "weight": 0}).messages} == {False}
    assert read({**record, "weight": None}).messages == read(record).messages


@pytest.mark.parametrize("weight", [-1, True, "2", float("nan"), float("inf"), [1]])
def test_a_record_s_weight_is_a_number_of_at_least_0(weight):
    with raises(BadMessage, match="'weight' is"):
        read({"messages": [USER, ANSWER], "weight": weight})


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([USER, USER, ANSWER], [("user", "u\n\nu"), ("assistant", "a")]),
        ([SYSTEM, SYSTEM, USER, ANSWER], [("system", "s\n\ns"), ("user", "u"), ("assistant", "a")]),
        (
            [USER, ANSWER, SYSTEM, USER, ANSWER, ANSWER],
            [("user", "u"), ("assistant", "a"), ("user", "s\n\nu"), ("assistant", "a\n\na")],
        ),
        ([USER, SYSTEM, ANSWER], [("user", "u\n\ns"), ("assistant", "a")]),
        ([USER, CALLS, RESULT, RESULT], [("user", "u"), ("assistant", ""), ("tool", "r"), ("tool", "r")]),
    ],
)
def test_messages_out_of_turn_are_merged_where_that_is_configured(messages, found):
    record = {"messages": messages}
    conversation = read_record(record, Place(path="a.jsonl", number=7), merge=True)
    assert [(message.role, message.content) for message in conversation.messages] == found


@pytest.mark.parametrize(
    "messages",
    [[ANSWER, USER], [USER, ANSWER, RESULT], [USER, CALLS, USER], [USER, ANSWER, {**ANSWER, "train": False}]],
)
def test_messages_that_merging_does_not_order_are_refused(messages):
    with raises(RolesOutOfOrder):
        read_record({"messages": messages}, Place(path="a.jsonl", number=7), merge=True)


@pytest.mark.parametrize("record", [{"input": "u", "output": "a"}, {"messages": [USER, ANSWER]}])
def test_a_system_text_beside_the_messages_comes_first(record):
    assert said({**record, "system": "s"})[0] == ("system", "s")
    assert said({"messages": [SYSTEM, USER, ANSWER], "system": "other"})[0] == ("system", "s")


def test_calls_of_functions_get_their_arguments_as_objects(call):
    found = read(call)
    (made,) = found.messages[1].fields["tool_calls"]
    assert made == {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    assert found.tools == call["tools"]
    same = {**call, "tools": json.dumps(call["tools"])}
    assert read(same) == found


def test_sharegpt_calls_are_calls():
    record = {
        "conversations": [
            {"from": "human", "value": "u"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a"},
        ]
    }
    found = read(record).messages
    assert [message.role for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1].fields["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    record["conversations"][1] = {"from": "gpt", "value": "", "tool_calls": CALLS["tool_calls"], "reasoning": "r"}
    (call,) = read(record).messages[1].fields["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {}}
    assert read(record).messages[1].fields["reasoning"] == "r"


def test_fields_that_templates_read_are_kept_and_train_is_none_of_them():
    message = read({"messages": [USER, {**ANSWER, "reasoning_content": "r", "name": None, "train": False}]}).messages[1]
    assert message.train is False
    assert message.for_template("") == {"role": "assistant", "content": "a", "reasoning_content": "r"}


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER, ANSWER, USER, ANSWER],
        [USER],
        [USER, CALLS],
        [USER, CALLS, RESULT, RESULT, CALLS, RESULT, ANSWER, USER],
    ],
)
def test_conversations_whose_speakers_take_turns_pass(messages):
    assert len(read({"messages": messages}).messages) == len(messages)


@pytest.mark.parametrize(
    ("messages", "number", "found"),
    [
        ([ANSWER], 1, "'assistant' speaks first"),
        ([RESULT], 1, "'tool' speaks first"),
        ([SYSTEM, SYSTEM, USER], 2, "'system' follows 'system'"),
        ([USER, SYSTEM], 2, "'system' follows 'user', where 'assistant' must speak"),
        ([USER, USER], 2, "'user' follows 'user'"),
        ([USER, ANSWER, ANSWER], 3, "'assistant' follows 'assistant'"),
        ([USER, ANSWER, RESULT], 3, "'tool' follows 'assistant'"),
        ([USER, CALLS, USER], 3, "'user' follows 'assistant with tool calls', where 'tool' must speak"),
        ([USER, CALLS, RESULT, USER], 4, "'user' follows 'tool'"),
    ],
)
def test_speakers_out_of_turn_are_named(messages, number, found):
    with raises(RolesOutOfOrder) as caught:
        read({"messages": messages})
    assert f"a.jsonl:7, message {number}: {found}" in str(caught.value)


def called(*ids):
    return {"role": "assistant", "tool_calls": [{"id": id_, "function": {"name": "f"}} for id_ in ids]}


def result(id_):
    return {"role": "tool", "content": f"of {id_}", "tool_call_id": id_}


def test_results_are_put_into_the_order_of_their_calls():
    turns = [USER, called("a", "b", "c"), result("c"), result("a"), result("b"), called("a"), result("a"), ANSWER]
    found = [content for role, content in said({"messages": turns}) if role == "tool"]
    assert found == ["of a", "of b", "of c", "of a"]


@pytest.mark.parametrize(
    "turns",
    [
        [called("a"), RESULT, ANSWER],
        [called(None, None), RESULT, {**RESULT, "tool_call_id": ""}, ANSWER],
        [called("a", "b")],
    ],
)
def test_results_without_ids_stay_where_they_are_where_that_is_clear(turns):
    assert len(read({"messages": [USER, *turns]}).messages) == len(turns) + 1


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([called("a", "b"), result("a"), result("x")], "message 4: its tool_call_id 'x' is not"),
        ([called("a", "b"), result("a"), result("a"), result("b")], "message 4: its tool_call_id 'a' is not"),
        ([called("a", "b"), RESULT, RESULT], "message 3: its tool_call_id None is not"),
        ([called("a", "b"), result("b"), RESULT], "message 4: its tool_call_id None is not"),
        ([called(None), result("a")], "message 3: its tool_call_id 'a' is not"),
        ([called("a"), RESULT, called("b"), result("a")], "message 5: its tool_call_id 'a' is not"),
        ([called("a", "b"), result("b")], "message 2: its call with the id 'a' has no result, or"),
        ([called("a", "a"), result("a")], "message 2: its call with the id 'a' has no result, or"),
    ],
)
def test_results_that_do_not_match_their_calls_are_named(turns, found):
    with raises(BadMessage) as caught:
        read({"messages": [USER, *turns, ANSWER], "system": "s"})
    assert f"a.jsonl:7, {found}" in str(caught.value)


@pytest.mark.parametrize("content", ["", " \n", None])
def test_an_empty_turn_of_the_assistant_is_refused(content):
    with raises(EmptyTurn, match=r"a\.jsonl:7, message 2"):
        read({"messages": [USER, {"role": "assistant", "content": content}]})


@pytest.mark.parametrize(("role", "hint"), [("asistant", "'assistant'"), ("Tool", "'tool'"), ("bot", "Roles are")])
def test_an_unknown_role_is_named_with_the_nearest(role, hint):
    with raises(UnknownRole, match=r"a\.jsonl:7, message 1") as caught:
        read({"messages": [{"role": role, "content": "x"}]})
    assert hint in str(caught.value)
    with raises(UnknownRole):
        read({"conversations": [{"from": role, "value": "x"}]})


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"text": "x"}, "'text'"),
        ({}, "none"),
        ({"input": "u"}, "'input'"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "objective such as 'dpo'"),
        ({"problem": "p", "solution": "s"}, "data.columns names columns"),
    ],
)
def test_a_record_of_no_form_is_named_with_its_keys(record, found):
    with pytest.raises(UnknownRecord, match=r"a\.jsonl:7: no conversation") as caught:
        read(record)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"messages": "x"}, "'messages' must be a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["x"]}, "message 1: it is a str"),
        ({"messages": [{"content": "x"}]}, "no text under 'role'"),
        ({"conversations": [{"value": "x"}]}, "no text under 'from'"),
        ({"messages": [{"role": "user", "content": 3}]}, "its content is of type int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of type image"),
        ({"input": ["u"], "output": "a"}, "its content is of type list"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "'train' is 'no'"),
        ({"messages": [USER, {**ANSWER, "weight": 2}]}, "'weight' is 2; it must be from 0 to 1"),
        ({"messages": [USER, {**ANSWER, "weight": True}]}, "'weight' is True"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}, "tool calls are not a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "no function with a name"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "of f: no JSON"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "1"}]}]},
            "not an object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "parts of type {}"),
        ({"messages": [USER, ANSWER], "images": ["x.png"]}, "it has 'images'; only text"),
        ({"input": "<audio>", "output": "a", "audio": {"path": "x.wav"}}, "it has 'audio'; only text"),
        ({"messages": [USER, ANSWER], "tools": "nonsense"}, "'tools': no JSON"),
        ({"messages": [USER, ANSWER], "tools": "[" * 100_000}, "'tools': no JSON"),
        ({"messages": [USER, ANSWER], "tools": '["\\ud800"]'}, r"'tools': half a character, \ud800"),
        ({"messages": [USER, ANSWER], "tools": ["f"]}, "list of JSON schemas"),
    ],
)
def test_messages_that_are_none_are_named_with_the_reason(record, found):
    with raises(BadMessage, match=r"a\.jsonl:7") as caught:
        read(record)
    assert found in str(caught.value)


def test_files_of_every_format_give_the_same_records(tmp_path, talk):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow has no Parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(talk))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(talk).encode()))
    (tmp_path / "c.json").write_text(json.dumps([talk], indent=2))
    (tmp_path / "d.json").write_text(json.dumps(talk))
    table = pyarrow.Table.from_pylist([talk])
    parquet.write_table(table, tmp_path / "e.parquet")
    for name, writer in (("f", pyarrow.ipc.new_stream), ("g", pyarrow.ipc.new_file)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as sink:
            sink.write_table(table)
    found, _ = read_records([tmp_path / "*"], "data.train_files")
    assert [record for _, record in found] == [talk] * 7


def test_a_table_gives_no_call_the_arguments_of_others(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    records = [
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [{"name": name, "arguments": {name: "x"}}]}],
            "tools": [{"name": name, "parameters": {"properties": {name: {"type": "string"}}}}],
        }
        for name in ("f", "g")
    ]
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    found, _ = read_records([tmp_path / "a.parquet"], "data.train_files")
    assert [record for _, record in found] == records


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_of_json_are_parsed(tmp_path, form):
    """The datasets library stores objects whose keys or types differ as texts of JSON."""
    datasets = pytest.importorskip("datasets", minversion="4.8", reason="these datasets have no columns of JSON")
    records = [
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}],
            "tools": None,
        }
        for arguments in ({"day": "today", "zone": None}, {"day": 3})
    ]
    found = datasets.Dataset.from_list(records, on_mixed_types="use_json")
    found.to_parquet(tmp_path / "parquet.parquet") if form == "parquet" else found.save_to_disk(tmp_path / "saved")
    read, _ = read_records([tmp_path / ("parquet.parquet" if form == "parquet" else "saved")], "data.train_files")
    assert [record["messages"] for _, record in read] == [record["messages"] for record in records]


@pytest.mark.parametrize(("text", "reason"), [('{"a"', "a.parquet"), ('"\\ud83d"', "half a character")])
def test_a_column_that_says_it_is_json_and_is_not_is_refused(tmp_path, text, reason):
    pa = pytest.importorskip("pyarrow", minversion="19", reason="pyarrow has no JSON type")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"messages": pa.array([text], pa.json_())}), tmp_path / "a.parquet")
    with raises(ArrowUnreadable, match=reason):
        list(read_records([tmp_path / "a.parquet"], "data.train_files")[0])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_git_lfs_pointer_is_named_with_what_fetches_the_file(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1")
    with raises(DataFileUnreadable, match="git lfs pull"):
        read_records([tmp_path / name], "data.train_files")


def test_a_directory_that_the_datasets_library_wrote_is_read(tmp_path, shipped):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    plain = [record for record in shipped if "tools" not in record]
    datasets.Dataset.from_list(plain).save_to_disk(tmp_path / "saved")
    found, _ = read_records([tmp_path / "saved"], "data.train_files")
    assert [record for _, record in found] == plain


def test_a_directory_stands_for_its_files_of_one_format(tmp_path, write, talk):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/README.md").write_text("about")
    for name in ("b.jsonl", "a.ndjson.gz", ".c.jsonl"):
        line = json.dumps(talk).encode()
        (tmp_path / "lines" / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    plain = datasets.Dataset.from_list([talk])
    (tmp_path / "tables").mkdir()
    plain.to_parquet(tmp_path / "tables/a.parquet")
    datasets.DatasetDict(train=plain, test=plain).save_to_disk(tmp_path / "splits")
    shutil.copy(tmp_path / "splits/train/data-00000-of-00001.arrow", tmp_path / "splits/train/cache-1.arrow")
    for name, count in (("lines", 2), ("tables", 1), ("splits/train", 1), ("splits", 1)):
        found, _ = read_records([tmp_path / name], "data.train_files")
        assert [record for _, record in found] == [talk] * count
    with raises(DataFileNotFound, match=r"found nearby: '.*splits/test', '.*splits/train'"):
        read_records([tmp_path / "splits"], "data.validation_files", split="validation")


def test_places_count_lines_and_records(write):
    path = write({"a": 1}, "", {"b": 2})
    found, _ = read_records([path], "data.train_files")
    assert [str(place) for place, _ in found] == [f"{path}:1", f"{path}:3"]
    table = path.with_name("a.csv")
    table.write_text('a,b\n1,"2\n3"\n\n4,"5\n6\n7"\n8,9\n')
    found, _ = read_records([table], "data.train_files")
    assert [str(place) for place, _ in found] == [f"{table}:2", f"{table}:5", f"{table}:8"]


@pytest.mark.parametrize(
    ("name", "content", "error", "found"),
    [
        ("a.jsonl", b'{"a": 1}\n{"b": \n', BadJsonLine, "a.jsonl:2"),
        ("a.jsonl", b'{"a": x}', BadJsonLine, "a.jsonl:1: not a JSON object: Expecting value at column 7."),
        ("a.jsonl", b'{"a": "b\n', BadJsonLine, "not a JSON object: Unterminated string starting at column 7."),
        (
            "a.jsonl",
            b'{"a": 1}\n{"b": [{"c": 1, "c": 1}]}',
            BadJsonLine,
            "2: not a JSON object: the key 'c' occurs twice",
        ),
        ("a.jsonl", b'[{"a": 1}', BadJsonFile, "a.jsonl"),
        ("a.jsonl", b'[{"a": 1}]\n[{"a": 2}]\n', BadJsonLine, "a.jsonl:1: not a JSON object: it is a list"),
        ("a.jsonl", b'[\n{"a": 1}\n]\n[{"a": 2}]\n', BadJsonFile, "Extra data"),
        ("a.jsonl", b'{"input": "a\\ud83d", "output": "b"}', BadJsonLine, r"it holds half a character, \ud83d"),
        ("a.json", b'[{"a": 1}', BadJsonFile, "a.json"),
        ("a.json", b"[1]", BadJsonFile, "an entry is not an object"),
        ("a.json", b'[{"a": 1, "a": 2}]', BadJsonFile, "the key 'a' occurs twice"),
        ("a.json", b'[{"input": "a\\ud83d", "output": "b"}]', BadJsonFile, r"it holds half a character, \ud83d"),
        ("a.jsonl", b'{"a": "caf\xe9"}', TextNotUtf8, "it looks like CP1252"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), TextNotUtf8, "it looks like UTF-16"),
        (
            "a.jsonl.xz",
            lzma.compress(b"{}"),
            DataFileUnreadable,
            "it is compressed with xz, and only gzip and Zstandard",
        ),
        ("a.jsonl", bz2.compress(b"{}"), DataFileUnreadable, "it is compressed with bzip2"),
        ("a.json", gzip.compress(b"{}", mtime=0), DataFileUnreadable, "it is compressed with gzip"),
        ("a.csv", b"input,output\na,b,c\n", DataFileUnreadable, "line 2: 3 columns, and the first line names 2"),
        ("a.csv", b'input,output\n"a\nb",c\n"d\ne",f,g\n', DataFileUnreadable, "line 4: 3 columns"),
        ("a.csv", b"input,output,input\na,b,c\n", DataFileUnreadable, "line 1: columns 1 and 3 are both named 'input'"),
        ("a.tsv", b'input\toutput\n"a\tb\n', DataFileUnreadable, "line 2: unexpected end of data"),
        ("a.csv", b"input,output\n", NoRecords, "a.csv holds no records"),
        ("a.jsonl", b"\n", NoRecords, "a.jsonl holds no records"),
        ("a.json", b"[]", NoRecords, "a.json holds no records"),
        ("a.arrow", b"nonsense", ArrowUnreadable, "a.arrow"),
        ("a.parquet", b"nonsense", ArrowUnreadable, "a.parquet"),
        ("b.jsonl", b"", DataFileNotFound, "a.jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, error, found):
    if name.endswith(("arrow", "parquet")):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    wanted = tmp_path / name.replace("b.", "a.")
    (tmp_path / name).write_bytes(content)
    with raises(error) as caught:
        list(read_records([wanted], "data.train_files")[0])
    assert found in str(caught.value)


def test_a_parquet_file_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet")
    assert (EXPANDS_TO_BYTES, EXPANDS_BY) == (2**30, 200)
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_TO_BYTES", 2**20)
    for name, letters in (("a", 1 << 12), ("b", 1 << 7)):
        pq.write_table(pa.table({"input": ["a" * letters] * 5000}), tmp_path / f"{name}.parquet")
    with raises(ArrowUnreadable, match="expands to more than 200 times its size") as caught:
        read_records([tmp_path / "a.parquet"], "data.train_files")
    assert caught.value.code == "NXDT-D309"
    assert len(read_records([tmp_path / "b.parquet"], "data.train_files")[0]) == 5000


def test_a_line_that_is_no_record_is_shown_one(write, load):
    with raises(BadJsonLine) as caught:
        load(write('{"messages":'))
    example = json.loads(caught.value.do().partition("such as ")[2].partition(";")[0])
    roles = [message.role for message in read_record(example, Place(path="a.jsonl", number=1)).messages]
    assert roles == ["user", "assistant"]


def bomb(pa, name):
    """Return a column whose values take 32 MiB or more, and whose file takes some KB."""
    if name == "texts":
        return pa.array(["a" * 2**15] * 1000)
    if name == "nulls":
        return pa.nulls(2**22)
    if name == "lists of nulls":
        return pa.FixedSizeListArray.from_arrays(pa.nulls(2**22), 2**21)
    if name == "numbers":
        return pa.array([[7] * 2**22])
    if name == "views":
        views = ((2**15).to_bytes(4, "little") + b"aaaa" + bytes(8)) * 1000
        return pa.Array.from_buffers(pa.string_view(), 1000, [None, pa.py_buffer(views), pa.py_buffer(b"a" * 2**15)])
    if name == "run-end":
        return pa.RunEndEncodedArray.from_arrays(pa.array([2**22], pa.int32()), ["a"])
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["a" * 2**15])
    if name == "dictionary":
        return repeated
    if name == "fixed":
        return pa.array([b"a" * 2**15] * 1000, pa.binary(2**15))
    return pa.ListArray.from_arrays(pa.array([0, 1000], pa.int32()), repeated)


_IN_ARROW = ("texts", "nulls", "lists of nulls", "numbers", "views", "run-end", "dictionary", "dictionary in a list")
_IN_PARQUET = ("texts", "numbers", "dictionary", "dictionary in a list", "fixed")


def lying(pq, path):
    """Let the footer of a Parquet file declare sizes and numbers of values of 5."""

    def varint(number):
        more = number >> 7
        return bytes([number & 127 | (128 if more else 0)]) + (varint(more) if more else b"")

    content, metadata = path.read_bytes(), pq.ParquetFile(path).metadata
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer, group = content[begin:], metadata.row_group(0)
    for number in {group.total_byte_size, group.column(0).total_uncompressed_size, group.column(0).num_values}:
        true = varint(2 * number)
        footer = footer.replace(true, b"\x8a" + b"\x80" * (len(true) - 2) + b"\0")
    path.write_bytes(content[:begin] + footer)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size == 5


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("file", name) for name in _IN_ARROW),
        *(("stream", name) for name in _IN_ARROW),
        *(("parquet", name) for name in _IN_PARQUET),
        *(("lying", name) for name in ("texts", "numbers")),
        ("delta", "texts"),
    ],
)
def test_tables_of_some_kilobytes_take_no_more_memory_than_their_limit(tmp_path, monkeypatch, name, form):
    pa = pytest.importorskip("pyarrow", minversion="18", reason="pyarrow writes no views")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_TO_BYTES", 2**22)
    monkeypatch.setattr("nxdt_core.data.files.tables.EXPANDS_BY", 1)
    table = pa.table({"input": bomb(pa, name)})
    path = tmp_path / ("a.arrow" if form in ("file", "stream") else "a.parquet")
    if path.suffix == ".parquet":
        more = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"} if form == "delta" else {}
        if form == "lying":
            more = {"use_dictionary": False}
        pq.write_table(table, path, compression="zstd", **more)
        if form == "lying":
            lying(pq, path)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(path, table.schema, options=options) as writer:
            writer.write_table(table)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with raises(ArrowUnreadable, match="expands to more than|which is not read"):
            read_records([path], "data.train_files")
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 2**23


def test_an_arrow_file_whose_footer_leaves_batches_out_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pa.table({"input": ["a", "b"]})
    for rows in (1, 2):
        with pa.ipc.new_file(tmp_path / f"{rows}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    one, two = ((tmp_path / f"{rows}.arrow").read_bytes() for rows in (2, 1))
    footer = int.from_bytes(two[-10:-6], "little")
    (tmp_path / "a.arrow").write_bytes(one[: -10 - int.from_bytes(one[-10:-6], "little")] + two[-10 - footer :])
    with raises(ArrowUnreadable, match="its footer names 2 batches, and 1 are before it"):
        read_records([tmp_path / "a.arrow"], "data.train_files")
