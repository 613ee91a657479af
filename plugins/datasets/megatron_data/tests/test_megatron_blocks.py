"""Any file is read in whole records, from any border between blocks on, however it is compressed."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import zstandard
from nxdt_plugin_megatron_data import preprocess as progress
from nxdt_plugin_megatron_data.encoding import RecordEncoder, TokenizationOptions
from nxdt_plugin_megatron_data.preprocess import Place, read_blocks
from nxdt_testing.errors import raises

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.errors.data import DataFileUnreadable

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(progress, "_BLOCK_BYTES", 64)


@pytest.fixture
def lines():
    random = np.random.default_rng(1)
    return [bytes(random.integers(97, 123, size, dtype=np.uint8)) for size in random.integers(0, 90, 60).tolist()]


def content(found):
    return b"".join(block.content for block in found)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("last", [b"", b"\n"])
def test_records_come_whole_and_in_order_from_every_border_on(tmp_path, lines, ending, last):
    whole = b"\n".join(lines) + last
    files = [tmp_path / f"a.jsonl{ending}", tmp_path / f"b.jsonl{ending}"]
    files[0].write_bytes(PACK[ending](whole))
    files[1].write_bytes(PACK[ending](whole))
    found = list(read_blocks(files, Place(), None))
    assert len(found) > 20
    assert content(found) == whole * 2
    assert all(block.content.endswith(b"\n") for block in found if block.end.offset != len(whole))
    for number, block in enumerate(found):
        assert block.begin.line == 1 + whole[: block.begin.offset].count(b"\n")
        rest = list(read_blocks(files, block.end, None))
        assert content(rest) == content(found[number + 1 :])
    assert found[-1].disk_bytes == sum(path.stat().st_size for path in files)


def test_separators_that_overlap_are_found_alike_from_every_border_on(tmp_path):
    random = np.random.default_rng(2)
    runs = random.integers(1, 6, 200).tolist()
    whole = b"".join(b"w%d" % number + b"\n" * run for number, run in enumerate(runs))
    (tmp_path / "a.txt").write_bytes(whole)
    wanted = [text for text in whole.decode().split("\n\n") if text.strip()]

    def texts(start):
        found = [*read_blocks([tmp_path / "a.txt"], start, b"\n\n")]
        return [text for block in found for text in block.content.decode().split("\n\n") if text.strip()], found

    in_one_go, blocks_of_it = texts(Place())
    assert in_one_go == wanted
    assert len(blocks_of_it) > 5
    for block in blocks_of_it:
        before = [text for text in whole[: block.end.offset].decode().split("\n\n") if text.strip()]
        assert before + texts(block.end)[0] == wanted


@pytest.mark.parametrize("separator", ["\n\n", "<|>", None])
def test_text_is_cut_at_its_separator_or_not_at_all(tmp_path, lines, separator):
    documents = [line.decode() for line in lines if line]
    (tmp_path / "a.txt").write_text((separator or "\n").join(documents))
    encoder = RecordEncoder(ByteTokenizer(), TokenizationOptions(text_key="text", separator=separator, append_eod=True))
    found = []
    for block in read_blocks([tmp_path / "a.txt"], Place(), separator.encode() if separator else None):
        encoded = encoder.encode(block.content, json_lines=False)
        ids = np.frombuffer(encoded.tokens, "<u2")
        for part in np.split(ids, np.cumsum(encoded.lengths)[:-1]):
            assert part[-1] == ByteTokenizer.eos_id
            found.append(bytes(part[:-1].tolist()).decode())
    assert found == (documents if separator else ["\n".join(documents)])


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' + b'{"text": "b"}\n' * 9)
    found = list(read_blocks([tmp_path / "a.jsonl"], Place(), None))
    assert content(found).startswith(b'{"text": "a"}')
    assert found[-1].end.offset == (tmp_path / "a.jsonl").stat().st_size


def test_several_frames_and_members_are_one_file(tmp_path, lines):
    for ending in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(b"".join(PACK[ending](line + b"\n") for line in lines))
        assert content(read_blocks([path], Place(), None)) == b"".join(line + b"\n" for line in lines)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damaged_and_cut_compression_is_told_with_the_file(tmp_path, lines, ending):
    packed = PACK[ending](b"\n".join(lines * 20))
    for broken in (b"no such format", packed[: len(packed) // 2], packed[:40] + b"\0" * 40 + packed[80:]):
        (tmp_path / f"a.jsonl{ending}").write_bytes(broken)
        with raises(DataFileUnreadable, match=rf"a\.jsonl{ending} cannot be read"):
            list(read_blocks([tmp_path / f"a.jsonl{ending}"], Place(), None))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b'{"text": "x"', "not a JSON object: "),
        (b"[1]", "it is a list"),
        (b'{"body": "x", "id": 3}', "no text under the key 'text'; its keys are 'body', 'id'"),
        (b'{"text": 3}', "under the key 'text' is not text, but of type int"),
        (b'{"text": null}', "is not text, but of type NoneType"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff"),
        (b'{"text": "It\x92s"}', "byte 0x92; it looks like CP1252, which 'iconv -f CP1252 -t UTF-8' converts"),
        (b'{"text": "\\ud800"}', "half a character"),
        pytest.param(b"[" * 100_000, "not a JSON object", id="deep lists"),
    ],
)
def test_records_without_text_are_told_with_their_line(record, reason):
    encoder = RecordEncoder(ByteTokenizer(), TokenizationOptions(text_key="text", separator=None, append_eod=False))
    good = b'{"text": "a\\u2028b"}'
    found = encoder.encode(b"\n".join([good, b"  ", record, good, b'{"text": ""}', b""]), json_lines=True)
    assert [fault[0] for fault in found.faults] == [2]
    assert reason in found.faults[0][1]
    assert (found.records, found.empty, found.lengths.tolist()) == (4, 1, [5, 5])
