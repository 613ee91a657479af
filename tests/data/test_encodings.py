"""A text that is not UTF-8 is named with its encoding, and the command of the error converts it."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pytest
import zstandard
from nxdt_testing.errors import raises

from nxdt_core.data.files.paths import decode, json_object, read_bytes
from nxdt_core.errors.data import TextNotUtf8

TEXTS = [
    ("cp1252", "He said “don’t” – café, naïve…  über 5 €.", "CP1252"),
    ("cp1252", "It’s fine", "CP1252"),
    ("cp1252", "Äpfel, Öl und Übermut: große Straßen", "CP1252"),
    ("latin-1", "Le café est très bon, à côté de la forêt.", "CP1252"),
    ("utf-16", "It’s fine, 你好", "UTF-16"),
    ("utf-16", "plain", "UTF-16"),
    ("utf-32", "It’s fine, 你好", "UTF-32"),
    ("utf-16-le", "plain", "UTF-16LE"),
    ("utf-16-be", "plain", "UTF-16BE"),
    ("utf-32-le", "It is “fine”", "UTF-32LE"),
    ("utf-32-be", "plain", "UTF-32BE"),
]
PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize(("encoding", "text", "name"), TEXTS)
def test_the_command_of_the_error_makes_the_file_readable(tmp_path, encoding, text, name, ending):
    needed = {"": (), ".gz": ("gzip",), ".zst": ("zstd",)}[ending]
    whole = f"first\n{text}\nlast\n"
    path = tmp_path / f"a b.txt{ending}"
    path.write_bytes(PACKED[ending](whole.encode(encoding)))
    with raises(TextNotUtf8) as caught:
        decode(path, read_bytes(path))
    error = caught.value
    assert error.encoding == name
    assert error.shown in whole
    assert f"it looks like {name}, in which the text reads '" in error.what().replace('"', "'")
    if any(shutil.which(tool) is None for tool in ("iconv", *needed)):
        pytest.skip("a tool of the command is not installed")
    subprocess.run(["sh", "-c", error.do().partition(": ")[2]], check=True)
    assert decode(path, read_bytes(tmp_path / f"a b.utf-8.txt{ending}")) == whole


def test_the_byte_is_named_by_its_line_and_its_place_there(tmp_path):
    with raises(TextNotUtf8, match=r"a\.txt is not UTF-8: byte 0xe9 at position 3 of line 2; .* reads 'café'\."):
        decode(tmp_path / "a.txt", b"good\ncaf\xe9\n")
    with raises(TextNotUtf8, match="byte 0xe9 at position 10 of line 7;"):
        json_object(tmp_path / "a.jsonl", 7, b'{"a": "caf\xe9"}')


def test_lines_far_from_the_byte_do_not_decide(tmp_path):
    lines = ["plain english, and more of it"] * 20_000
    lines[15_000] = "It’s “fine”"
    with raises(TextNotUtf8, match="of line 15001; it looks like CP1252, in which the text reads 'It’s “fine”'"):
        decode(tmp_path / "a.txt", "\n".join(lines).encode("cp1252"))


OTHER_SCRIPTS = [
    ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy."),
    ("cp1251", "Привет, как дела? Сегодня хорошая погода в Москве."),
    ("koi8_r", "Привет, как дела? Сегодня хорошая погода в Москве."),
    ("shift_jis", "こんにちは、今日はいい天気ですね。東京へ行きます。"),
    ("gb18030", "你好,今天天气很好,我们去北京。"),
]


@pytest.mark.parametrize(
    "content",
    [*(text.encode(encoding) for encoding, text in OTHER_SCRIPTS), bytes(range(254, 127, -1)) * 40, b"plain\x81"],
)
def test_other_bytes_are_named_without_an_encoding(tmp_path, content):
    with raises(TextNotUtf8) as caught:
        decode(tmp_path / "a.txt", content)
    assert "looks like" not in str(caught.value)
    assert "iconv -f ENCODING -t UTF-8" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"a", b"a\0", b"ab\0c", "\ufeffgrün 你好".encode()])
def test_utf8_passes(tmp_path, content):
    assert decode(tmp_path / "a.txt", content) == content.decode("utf-8-sig")
