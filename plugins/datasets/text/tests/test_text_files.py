"""Files become documents; each way to get them wrong is named with its place."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pytest
import zstandard
from nxdt_plugin_text.loader import documents
from nxdt_testing.errors import raises

from nxdt_core.data.files.paths import expand, read_bytes
from nxdt_core.errors.data import (
    BadJsonLine,
    DataFileNotFound,
    DataFileUnreadable,
    EmptyTextFile,
    JsonTextMissing,
    TextNotUtf8,
)


def read(path, separator=None, text_key="text"):
    return [text for text, _ in documents(path, read_bytes(path), text_key=text_key, separator=separator)]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def test_a_plain_file_is_one_document_as_it_stands(tmp_path):
    text = "Erste Zeile\r\n\n  zweite – Zeile\n\n"
    assert read(written(tmp_path / "a.txt", text)) == [text]


def test_a_separator_cuts_documents_and_blank_ones_vanish(tmp_path):
    assert read(written(tmp_path / "a.txt", "one\n\ntwo\nlines\n\n\n\n \n\n"), "\n\n") == ["one", "two\nlines"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert read(written(tmp_path / "a.txt", b"\xef\xbb\xbfhi")) == ["hi"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "A.JSONL", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl_gives_a_document_a_line(tmp_path, name):
    lines = [json.dumps({"text": text, "id": 1}, ensure_ascii=False) for text in ("one", "t\u2028wo\n", "drei 🙂")]
    content = ("\n".join([lines[0], "", *lines[1:]]) + "\r\n").encode()
    path = written(tmp_path / name, PACK.get(Path(name).suffix, bytes)(content))
    assert read(path) == ["one", "t\u2028wo\n", "drei 🙂"]


def test_records_with_blank_text_are_counted_and_those_without_weight_are_not(tmp_path, caplog):
    records = [{"text": "one"}, {"text": " "}, {"text": ""}, {"text": "two", "share": 0}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    found = documents(path, read_bytes(path), text_key="text", separator=None, weight_key="share")
    assert [text for text, _ in found] == ["one"]
    assert "a.jsonl: left out 2 records: the text is blank" in caplog.text


def test_another_key_holds_the_text(tmp_path):
    assert read(written(tmp_path / "a.jsonl", '{"content": "x"}'), text_key="content") == ["x"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_plain_text_is_read(tmp_path, ending):
    parts = PACK[ending](b"one, ") + PACK[ending](b"two")  # as cat joins them
    assert read(written(tmp_path / f"a.txt{ending}", parts)) == ["one, two"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [0, 10, 25])
def test_damaged_compression_is_named(tmp_path, cut, ending):
    content = PACK[ending](b"some text that is longer than a header")[: cut or None]
    path = written(tmp_path / f"a.txt{ending}", content if cut else b"not compressed at all")
    with raises(DataFileUnreadable, match=rf"a\.txt\{ending} cannot be read"):
        read(path)


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".txt.gz", ".jsonl.zst"])
def test_a_git_lfs_pointer_is_not_read_as_text(tmp_path, ending):
    path = written(tmp_path / f"a{ending}", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with raises(DataFileUnreadable, match=rf"a{re.escape(ending)} cannot be read: .*git lfs pull"):
        read(path)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damage_within_compressed_data_is_named(tmp_path, ending):
    content = bytearray(PACK[ending](b"some text that is longer than a header" * 9))
    content[20] ^= 0xFF
    with raises(DataFileUnreadable):
        read(written(tmp_path / f"a.txt{ending}", bytes(content)))


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.txt", " \n\n"), ("a.jsonl", "\n"), ("a.txt", b"\xef\xbb\xbf")]
)
def test_a_file_without_text_is_named(tmp_path, name, content):
    with raises(EmptyTextFile, match=name):
        read(written(tmp_path / name, content))


def test_an_empty_text_among_others_is_no_document(tmp_path):
    assert read(written(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "x"}')) == ["x"]


def test_bytes_that_are_no_utf8_are_named_with_position_and_line(tmp_path):
    with raises(TextNotUtf8, match="byte 0xe9 at position 3 of line 2; it looks like CP1252"):
        read(written(tmp_path / "a.txt", b"good\ncaf\xe9\n"))


def test_the_position_counts_a_byte_order_mark(tmp_path):
    with raises(TextNotUtf8, match="position 4 of line 1"):
        read(written(tmp_path / "a.txt", b"\xef\xbb\xbfa\xff"))


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[1]", '"text"', "null", "nonsense", '{"text": "a"} {"text": "b"}'),
        pytest.param("[" * 100_000, id="deep lists"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    with raises(BadJsonLine, match=r'a\.jsonl:3: (.|\n)*such as {"text": "\.\.\."}'):
        read(written(tmp_path / "a.jsonl", f'{{"text": "x"}}\n\n{line}\n'))


@pytest.mark.parametrize(
    ("line", "found"),
    [('{"txt": "a", "id": 1}', "its keys are 'txt', 'id'"), ('{"text": 3}', "its value is a int"), ("{}", "none")],
)
def test_a_line_without_text_is_named(tmp_path, line, found):
    with raises(JsonTextMissing, match=r"a\.jsonl:1: no text under the key 'text'") as caught:
        read(written(tmp_path / "a.jsonl", line))
    assert found in str(caught.value)


def test_patterns_are_expanded_in_order_and_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl", "deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, "x")
    found = expand([tmp_path / "c.jsonl", tmp_path / "*.txt", str(tmp_path / "**" / "d.txt")], "data.train_files")
    assert [path.name for path in found] == ["c.jsonl", "a.txt", "b.txt", "d.txt"]


def test_a_name_with_the_letters_of_a_pattern_is_a_name(tmp_path):
    path = written(tmp_path / "a[1].txt", "x")
    assert expand([path], "key") == [path]


@pytest.mark.parametrize("pattern", ["*.txt", "**/a.txt", "a.tx[t]"])
def test_a_directory_with_the_letters_of_a_pattern_is_never_another_one(tmp_path, pattern):
    for name in ("exp1", "exp[1]"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "a.txt", name)
    assert expand([tmp_path / "exp[1]" / pattern], "key") == [tmp_path / "exp[1]" / "a.txt"]
    assert expand([tmp_path / "exp[12]" / pattern], "key") == [tmp_path / "exp1" / "a.txt"]


def test_package_paths_lead_to_shipped_data():
    (path,) = expand(["package://nxdt_plugin_text/data/kjv.txt"], "key")
    assert path.is_file()
    with raises(DataFileNotFound, match="no_such_package"):
        expand(["package://no_such_package/x.txt"], "key")


def test_a_missing_file_is_named_with_its_key_and_what_lies_nearby(tmp_path):
    written(tmp_path / "corpus.txt", "x")
    with raises(DataFileNotFound, match=r"data\.train_files: no file is found at .*corpsu\.txt") as caught:
        expand([tmp_path / "corpsu.txt"], "data.train_files")
    assert str(tmp_path / "corpus.txt") in str(caught.value)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with raises(DataFileUnreadable, match="it is not a file"):
        expand([tmp_path / "pipe"], "data.train_files")


def test_a_directory_is_no_file_and_its_files_are_named(tmp_path):
    written(tmp_path / "corpus.txt", "x")
    with raises(DataFileNotFound, match=r"key: no file is found at '.*', which is a directory; .*corpus\.txt'"):
        expand([tmp_path], "key")


@pytest.mark.parametrize("pattern", ["*.txt", "no/such/place/a.txt"])
def test_a_pattern_without_matches_is_named(tmp_path, pattern):
    with raises(DataFileNotFound):
        expand([tmp_path / Path(pattern)], "key")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_small_file_that_expands_without_end_is_refused(tmp_path, monkeypatch, ending):
    monkeypatch.setattr("nxdt_core.data.files.paths.EXPANDS_TO_BYTES", 1 << 20)
    path = written(tmp_path / f"a.txt{ending}", PACK[ending](b"a" * (1 << 25)))
    with raises(DataFileUnreadable, match=r"expands to more than 200 times its size and 1 MiB"):
        read_bytes(path)
    assert len(read_bytes(written(tmp_path / f"b.txt{ending}", PACK[ending](b"a" * 100_000)))) == 100_000
